"""The fleet's report from a real fleet: slots over Serve, figures of all members, the page, and `lorafleet top`."""

import httpx
import pytest

from router.view.records import FleetReport
from tests.tiny_fleet import ADAPTERS, TinyFleet

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
    assert "alias_moved" in {event.kind for event in report.events or ()}


def test_page_is_served_and_top_speaks(tiny_fleet: TinyFleet) -> None:
    page = httpx.get(f"{tiny_fleet.fleet.url}/dashboard")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert tiny_fleet.fleet.cli("top", "--once")["totals"]["num_slots"] > 0
