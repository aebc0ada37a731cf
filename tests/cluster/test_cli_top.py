"""`lorafleet top`: rates from two scrapes, and the tables they end in."""

from collections.abc import Iterator

import pytest

from cluster.console import scrape
from cluster.console.scrape import Scrape, hit_rate, per_second, read_scrape, request_rates, tokens_per_second
from cluster.console.top import build_frame, frame_grids
from tests.cluster.cli_harness import Cli
from tests.cluster.fake_control import FakeFleet, replica_record, serving


def page(
    running: int = 0, tokens: int = 0, loads: int = 0, hits: int = 0, misses: int = 0, legal: int = 0, sales: int = 0
) -> str:
    """A fleet's metrics: one replica with the given counts, one gateway with requests for two adapters."""
    samples = [
        (scrape.RUNNING, running),
        (scrape.WAITING, 3),
        (scrape.KV_USED, 25),
        (scrape.KV_FREE, 75),
        (scrape.TOKENS, tokens),
        (scrape.LOADS._replace(label="tier", value="host"), loads),
        (scrape.LOADS._replace(label="tier", value="node"), 1),
        (scrape.HITS, hits),
        (scrape.MISSES, misses),
    ]
    lines = [f"{metric}{{{_labels(label, value)}}} {number}" for (metric, label, value), number in samples]
    for model, outcome, number in (("legal", "ok", legal), ("legal", "disconnect", 1), ("sales", "ok", sales)):
        lines.append(f'{scrape.REQUESTS}{{instance="gateway",model="{model}",outcome="{outcome}"}} {number}')
    lines.append(f'{scrape.STREAMED_TOKENS}{{instance="gateway",model="legal"}} {2 * tokens}')
    return "\n".join((*lines, ""))


def _labels(label: str, value: str) -> str:
    return f'instance="replica-0",{label}="{value}"' if label else 'instance="replica-0"'


def scrapes(before: str, after: str, span_s: float = 2.0) -> tuple[Scrape, Scrape]:
    return read_scrape(before, 100.0), read_scrape(after, 100.0 + span_s)


def test_rates_are_growth_over_time() -> None:
    before, after = scrapes(page(tokens=100, loads=4), page(tokens=300, loads=5))
    assert per_second(before, after, "replica-0", scrape.TOKENS) == 100
    assert per_second(before, after, "replica-0", scrape.LOADS) == 0.5


def test_fleet_tokens_come_from_the_gateways() -> None:
    before, after = scrapes(page(tokens=100), page(tokens=300))
    assert tokens_per_second(before, after) == 200
    assert tokens_per_second(after, before) == 0


def test_restarted_or_unknown_instance_has_no_rate() -> None:
    before, after = scrapes(page(tokens=100), page(tokens=3))
    assert per_second(before, after, "replica-0", scrape.TOKENS) is None
    assert per_second(before, after, "replica-9", scrape.TOKENS) is None
    assert per_second(after, after, "replica-0", scrape.TOKENS) is None


def test_hit_rate_is_of_the_interval_and_falls_back_to_the_whole_life() -> None:
    before, after = scrapes(page(hits=10, misses=90), page(hits=13, misses=91))
    assert hit_rate(before, after, "replica-0") == 0.75
    assert hit_rate(before, before, "replica-0") == 0.1
    idle, _ = scrapes(page(), page())
    assert hit_rate(idle, idle, "replica-0") is None


def test_requests_sum_outcomes_and_rank_by_rate() -> None:
    before, after = scrapes(page(legal=100, sales=5), page(legal=101, sales=9))
    assert request_rates(before, after) == [("sales", 9, 2.0), ("legal", 102, 0.5)]


def test_adapter_first_seen_now_has_no_rate_yet() -> None:
    before, after = scrapes("", page(legal=50))
    assert {model: rate for model, _, rate in request_rates(before, after)} == {"legal": 0.0, "sales": 0.0}


def test_frame_joins_replicas_and_metrics_and_shows_a_dash_for_what_is_missing() -> None:
    before, after = scrapes(page(), page(running=2, tokens=84, hits=1))
    replicas = [replica_record(1), replica_record(0, resident=("a" * 64,))]
    rows = frame_grids(build_frame(replicas, before, after))[0].rows
    assert rows[0] == ("0", "replica-0", "1/4", "0", "2", "3", "25%", "42", "0.00", "100%")
    assert rows[1] == ("1", "replica-1", "0/4", "0", "-", "-", "-", "-", "-", "-")


def test_resident_slots_come_from_the_metrics_when_they_tell() -> None:
    slots = ((scrape.SLOTS_IDLE, 2), (scrape.SLOTS_PINNED, 1))
    lines = [f"{metric}{{{_labels(label, value)}}} {number}\n" for (metric, label, value), number in slots]
    before, after = scrapes("", "".join(lines))
    frame = build_frame(
        [replica_record(0, resident=("a" * 64,)), replica_record(1, resident=("a" * 64,))], before, after
    )
    assert [load.num_resident for load in frame.replicas] == [3, 1]


@pytest.fixture
def fleet() -> FakeFleet:
    pages = [page(tokens=0, legal=0), page(running=2, tokens=10_000, legal=10)]
    return FakeFleet(replicas=[replica_record(0)], metrics=pages)


@pytest.fixture
def cli(fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with serving(fleet) as url:
        yield Cli(url, capsys)


def test_top_once_prints_one_frame(cli: Cli) -> None:
    ran = cli("top", "--once", "--interval", "0.1")
    assert ran.status == 0
    title, header, replica, adapters, first, *_ = ran.out.splitlines()
    assert "1 replica," in title
    assert header.split()[:3] == ["RING", "REPLICA", "SLOTS"]
    assert replica.split()[:7] == ["0", "replica-0", "0/4", "0", "2", "3", "25%"]
    assert adapters.split() == ["ADAPTER", "REQUESTS", "REQUESTS/S"]
    assert first.split()[:2] == ["legal", "11"]


def test_top_once_json_is_one_document_with_rates(cli: Cli) -> None:
    frame = cli("top", "--once", "--interval", "0.1", "--json").json
    assert frame["replicas"][0]["num_running"] == 2
    assert 0 < frame["replicas"][0]["tokens_per_s"] <= 100_000
    assert frame["adapters"][0]["model"] == "legal"


def test_top_without_prometheus_text_is_refused(cli: Cli, fleet: FakeFleet) -> None:
    fleet.metrics = ["<html>"]
    ran = cli("top", "--once", "--interval", "0.1")
    assert ran.status == 1
    assert "is not Prometheus text" in ran.err
