"""The fleet's report and its page over HTTP: who may see what, what one look costs, and a thousand adapters."""

import asyncio
import re
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from registry.types import Scope
from replica.messages import SlotView
from router.app import create_app
from router.auth import Principal
from router.dashboard_files import FOLDER
from router.errors import AuthenticationFailed
from router.view.fleet_view import FleetView
from router.view.records import (
    AdapterRow,
    AdapterTable,
    Finding,
    FleetReport,
    History,
    HistoryPoint,
    ReplicaView,
    Rollout,
    SlotRow,
    TenantView,
    Totals,
    VersionTraffic,
)
from tests.router.fakes import one_choice
from tests.router.support import Stack, adapter_record, delta, digest, error_of, running

ROOT = Path(__file__).parent.parent.parent
SCOPES = {"looker": Scope.METRICS, "boss": Scope.ADMIN, "caller": Scope.INFER, "pusher": Scope.UPLOAD}
MAX_BYTES_PER_ADAPTER = 140
MAX_SECONDS_AT_1000 = 2.0


class Door:
    """Keys that are called as their scopes are."""

    async def authenticate(self, headers: Any) -> Principal:
        name = headers.get("authorization", "").removeprefix("Bearer ")
        if name not in SCOPES:
            raise AuthenticationFailed("no API key")
        return Principal(name, frozenset({SCOPES[name]}))

    def take_used(self) -> tuple[str, ...]:
        return ()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.view.fleet_view.FIRST_S", 0.01)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running() as made:
        made.fleet.script = lambda replica_id, request: one_choice(request.request_id, [(1, 2), (3,)])
        made.registry.reported = made.gateway.catalog.replicas
        yield made


async def fleet(stack: Stack, **query: Any) -> FleetReport:
    response = await stack.http.get("/v1/fleet", params=query)
    assert response.status_code == 200, response.text
    return FleetReport.model_validate_json(response.text)


async def test_report_has_calls_slots_and_events(stack: Stack) -> None:
    await stack.complete()
    stack.fleet.slot_views = {"r0": (SlotView("pinned", digest(1001), 2), SlotView("free"))}
    report = await fleet(stack)
    row = next(row for row in report.adapters.rows if row.name == "legal")
    assert (row.requests, row.live, row.num_slots, row.in_flight) == (1.0, 1, 1, 0)
    assert report.replicas[0].slots[0][:4] == ("pinned", "legal", 1, 2)
    assert [replica.answers for replica in report.replicas] == [False, False]
    assert report.events
    assert report.registry_answers


async def test_first_report_has_rates_already(stack: Stack) -> None:
    assert (await fleet(stack)).window_s > 0


async def test_members_that_answer_are_told_apart_from_those_that_do_not(stack: Stack) -> None:
    stack.fleet.texts = {"r1": b'lorafleet_replica_sequences{state="running"} 3\n'}
    first, second = (await fleet(stack)).replicas
    assert (first.answers, second.answers, second.running) == (False, True, 3)


async def test_without_the_registry_the_catalog_speaks(stack: Stack) -> None:
    stack.registry.reported = None
    report = await fleet(stack)
    assert not report.registry_answers
    assert len(report.replicas) == 2
    assert "registry_silent" in {finding.code for finding in report.findings}


async def test_many_who_look_cost_one_scrape(stack: Stack) -> None:
    view = FleetView(stack.gateway, "gateway")
    reports = await asyncio.gather(*(view.report(limit=10, with_events=True) for _ in range(20)))
    assert view.num_scrapes == 2, "one for what is now, one before it for rates"
    assert len({report.at_s for report in reports}) == 1


async def test_report_is_new_again_after_its_period_and_costly_ones_last_longer(stack: Stack) -> None:
    now_s = 100.0
    view = FleetView(stack.gateway, "gateway", clock=lambda: now_s)
    await view.report(limit=1, with_events=True)
    now_s += 0.9
    await view.report(limit=1, with_events=True)
    assert view.num_scrapes == 2
    now_s += 0.2
    await view.report(limit=1, with_events=True)
    assert view.num_scrapes == 3
    view._cost_s = 0.2
    assert view.period_s == pytest.approx(2.0)
    view._cost_s = 60.0
    assert view.period_s == 5.0


async def test_history_is_remembered_and_sent_once(stack: Stack) -> None:
    first = await fleet(stack)
    assert len(first.history.points) == 1
    assert (await fleet(stack, since=first.at_s)).history.points == ()


async def test_search_and_limit_are_of_the_adapters(stack: Stack) -> None:
    await stack.gateway.apply(delta([adapter_record("legal"), adapter_record("sales")], revision=2))
    found = (await fleet(stack, search="SAL")).adapters
    assert [row.name for row in found.rows] == ["sales"]
    assert (found.num_matching, found.num_total) == (1, 3)
    assert len((await fleet(stack, limit=1)).adapters.rows) == 1


@pytest.mark.parametrize("query", [{"limit": "many"}, {"since": "-1"}, {"since": "1e9"}, {"search": "x" * 101}])
async def test_bad_query_is_refused_by_field(stack: Stack, query: dict[str, str]) -> None:
    response = await stack.http.get("/v1/fleet", params=query)
    assert response.status_code == 400
    assert error_of(response)["param"] == next(iter(query))


@pytest.mark.parametrize(("key", "status"), [("", 401), ("nobody", 401), ("caller", 403), ("pusher", 403)])
async def test_report_is_refused_without_the_scope(key: str, status: int) -> None:
    async with guarded() as stack:
        response = await stack.http.get("/v1/fleet", headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == status
        assert error_of(response)["message"]


async def test_events_are_for_admins_alone() -> None:
    async with guarded() as stack:
        seen = {
            key: (await stack.http.get("/v1/fleet", headers={"Authorization": f"Bearer {key}"})).json()["events"]
            for key in ("looker", "boss")
        }
    assert seen["looker"] is None
    assert seen["boss"]


@asynccontextmanager
async def guarded() -> AsyncIterator[Stack]:
    """A stack whose callers need a key."""
    async with running() as stack:
        stack.gateway.authenticator = Door()
        stack.registry.reported = stack.gateway.catalog.replicas
        stack.app = create_app(stack.gateway)
        transport = httpx.ASGITransport(app=stack.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as stack.http:
            yield stack


async def test_page_loads_without_a_key_and_lets_nothing_foreign_in() -> None:
    async with guarded() as stack:
        page = await stack.http.get("/dashboard")
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["content-type"].startswith("text/html")


async def test_every_file_that_the_page_names_is_served_and_none_names_another_server(stack: Stack) -> None:
    for path in sorted(FOLDER.iterdir()):
        text = path.read_text()
        for name in re.findall(r'(?:src|href)="dashboard/([\w.]+)"|from "[.]/([\w.]+)"', text):
            response = await stack.http.get(f"/dashboard/{name[0] or name[1]}")
            assert response.status_code == 200, name
            assert "content-security-policy" in response.headers
        foreign = re.findall(r"https?://[^\s\"']+", text.replace("http://www.w3.org/2000/svg", ""))
        assert foreign == [], path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document[.]write|eval[(]| style=|onclick=", text)


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/config.py", "app.py", ""])
async def test_anything_else_is_no_file(stack: Stack, name: str) -> None:
    assert (await stack.http.get(f"/dashboard/{name}")).status_code == 404


async def test_file_that_a_browser_has_is_not_sent_again(stack: Stack) -> None:
    first = await stack.http.get("/dashboard/app.js")
    again = await stack.http.get("/dashboard/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_wheel_carries_the_page() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "static/*" in settings["package-data"]["router"]
    assert "router.view" in settings["packages"]


VIEWS = (FleetReport, Totals, Finding, ReplicaView, AdapterTable, TenantView, Rollout, VersionTraffic, History)


@pytest.mark.parametrize("record", VIEWS, ids=lambda record: record.__name__)
def test_every_field_is_documented(record: type[BaseModel]) -> None:
    section = (ROOT / "docs" / "api.md").read_text().partition("### Fleet\n")[2].partition("\n## ")[0]
    assert [name for name in record.model_fields if f"`{name}`" not in section] == []
    rows = (*AdapterRow._fields, *SlotRow._fields, *HistoryPoint._fields)
    assert [name for name in rows if f"`{name}`" not in section] == []


def test_every_finding_is_documented() -> None:
    codes = {*re.findall(r'code="([a-z_]+)"', (ROOT / "router" / "view" / "findings.py").read_text())}
    section = (ROOT / "docs" / "dashboard.md").read_text().partition("## What stands out\n")[2].partition("\n\n**")[0]
    assert {*re.findall(r"`([a-z_]+)`", section)} == codes


async def test_thousand_busy_adapters_are_a_bounded_answer_in_bounded_time() -> None:
    names = [f"tenant-{index:04}-adapter" for index in range(1000)]
    async with running(catalog=delta([adapter_record(name) for name in names])) as stack:
        for number, name in enumerate(names):
            resolution = stack.gateway.catalog.resolve("default", name)
            with stack.gateway.metrics.meter(resolution, f"tenant-{number % 50}", 5) as meter:
                meter.pace().arrived(9, 1)
        view = FleetView(stack.gateway, "gateway")
        began_s = time.process_time()
        report = await view.report(limit=1000, with_events=True)
        took_s = time.process_time() - began_s
        size = len(report.model_dump_json())
        print(f"1,000 adapters: {size / 1e3:.0f} kB, {took_s / view.num_scrapes:.2f} s a scrape")
        assert report.adapters.num_total == 1001
        assert {row.name for row in report.adapters.rows} <= {*names, "base"}
        assert size < 1000 * MAX_BYTES_PER_ADAPTER + 60_000
        assert took_s / view.num_scrapes < MAX_SECONDS_AT_1000
        few = await view.report(limit=10, with_events=True)
        assert len(few.model_dump_json()) < 50_000
