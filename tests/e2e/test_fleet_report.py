"""The fleet's report from a real fleet: slots over Serve, figures of all members, the page, and `lorafleet top`."""

import re
import subprocess
import sys

import httpx
import pytest

from router.view.records import FleetReport
from tests.e2e.test_metrics_truth import added_up
from tests.metrics_text import samples_of, value_of
from tests.tiny_fleet import ADAPTERS, NUM_GATEWAYS, TinyFleet

pytestmark = pytest.mark.serve


def test_report_shows_who_sits_where_and_every_member_answers(tiny_fleet: TinyFleet) -> None:
    url = tiny_fleet.fleet.url
    body = {"model": "alpha", "prompt": "Once", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    report = FleetReport.model_validate_json(httpx.get(f"{url}/v1/fleet", timeout=60).text)
    assert report.registry_answers
    assert report.missing == ()
    assert [replica.ring_id for replica in report.replicas] == list(range(len(tiny_fleet.fleet.replicas())))
    assert all(replica.answers and len(replica.slots) == replica.num_slots for replica in report.replicas)
    assert "alpha" in {slot.adapter for replica in report.replicas for slot in replica.slots}
    assert {*ADAPTERS} <= {row.name for row in report.adapters.rows}
    assert report.totals.tokens >= 4
    assert (report.num_gateways, report.num_gateways_counted) == (NUM_GATEWAYS, NUM_GATEWAYS)
    assert "alias_moved" in {event.kind for event in report.events or ()}


def test_page_is_served_and_top_speaks(tiny_fleet: TinyFleet) -> None:
    page = httpx.get(f"{tiny_fleet.fleet.url}/dashboard")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert tiny_fleet.fleet.cli("top", "--once")["totals"]["num_slots"] > 0


def test_one_scrape_covers_all_gateways_whichever_answers(tiny_fleet: TinyFleet) -> None:
    url = tiny_fleet.fleet.url
    body = {"model": "beta", "prompt": "Once", "max_tokens": 3, "ignore_eos": True}

    def answered() -> dict[str, float]:
        samples = samples_of(httpx.get(f"{url}/metrics", timeout=60).content)
        assert len(added_up(samples, "lorafleet_gateway_revision", "instance")) == NUM_GATEWAYS
        return added_up(samples, "lorafleet_tenant_tokens_total", "instance", "kind")

    before = answered()
    for _ in range(4 * NUM_GATEWAYS):
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    looks = [answered() for _ in range(2 * NUM_GATEWAYS)]
    assert looks == looks[:1] * len(looks), "another gateway answers, with the same figures"
    came = sum(value - before.get(key, 0) for key, value in looks[0].items() if key[1] == "completion")
    assert came == 3 * 4 * NUM_GATEWAYS
    gateways = {instance for instance, _ in looks[0]}
    targets = {target["labels"]["instance"] for target in httpx.get(f"{url}/metrics/targets", timeout=60).json()}
    members = {replica["replica_id"] for replica in tiny_fleet.fleet.replicas()}
    assert targets == {"registry", *gateways, *members}
    for gateway in gateways:
        alone = [httpx.get(f"{url}/metrics", params={"instance": gateway}, timeout=60) for _ in range(NUM_GATEWAYS)]
        assert {value_of(one.content, "lorafleet_tenant_in_flight", tenant="default") for one in alone} == {0}


def test_rays_own_metrics_are_there_beside_ours(tiny_fleet: TinyFleet) -> None:
    """Ray's exporter of this node, at the port that Ray says."""
    ask = "import ray; ray.init(log_to_driver=False); print(ray.nodes()[0]['MetricsExportPort'])"
    environment = tiny_fleet.fleet.driver_environment()
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, timeout=120)
    url = f"http://127.0.0.1:{done.stdout.strip()}/metrics"
    seen: set[str] = set()

    def is_told() -> bool:
        seen.update(re.findall(r"^(ray_\w+?)(?:_total)?\{", httpx.get(url, timeout=30).text, re.MULTILINE))
        return {"ray_actors", "ray_component_cpu_percentage", "ray_serve_deployment_replica_healthy"} <= seen

    tiny_fleet.fleet.wait_until(is_told, f"metrics of Ray at {url}", 60)
    assert "lorafleet_replica_steps_total" in httpx.get(f"{tiny_fleet.fleet.url}/metrics", timeout=60).text
