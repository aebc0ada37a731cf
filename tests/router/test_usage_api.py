"""The usage report over HTTP: who may see what, both formats, and what is refused."""

import csv
import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from registry.types import Scope
from registry.usage_records import UsageGroup, UsageRow
from tests.router.support import Stack, error_of
from tests.router.test_tenants import RING, guarded_stack

DEFAULT = (UsageGroup.TENANT, UsageGroup.VERSION)
ROWS = (
    UsageRow(
        tenant="acme", adapter="legal", version=2, digest="d" * 64, requests=3, prompt_tokens=5, output_tokens=7,
        device_ns=1_500_000_001,
    ),
    UsageRow(tenant="acme", requests=1, prompt_tokens=1, output_tokens=1, device_ns=0),
)  # fmt: skip


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with guarded_stack() as made:
        made.registry.usage_rows = list(ROWS)
        yield made


async def ask(stack: Stack, key: str = "admin", **params: Any) -> httpx.Response:
    return await stack.http.get("/v1/usage", params=params, headers=RING.header(key))


async def test_json_has_the_columns_of_the_groups(stack: Stack) -> None:
    response = await ask(stack, **{"from": "100", "to": "7200"})
    assert response.json() == {
        "object": "list", "from_s": 100, "to_s": 7200, "group_by": ["tenant", "version"],
        "data": [
            {"tenant": "acme", "adapter": "legal", "version": 2, "digest": "d" * 64, "requests": 3, "prompt_tokens": 5,
             "output_tokens": 7, "device_s": 1.500000001},
            {"tenant": "acme", "adapter": None, "version": None, "digest": None, "requests": 1, "prompt_tokens": 1,
             "output_tokens": 1, "device_s": 0.0},
        ],
    }  # fmt: skip


async def test_csv_says_the_same_to_the_nanosecond(stack: Stack) -> None:
    response = await ask(stack, format="csv")
    assert response.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [row["device_s"] for row in rows] == ["1.500000001", "0.000000000"]
    assert [(row["tenant"], row["adapter"], row["version"]) for row in rows] == [
        ("acme", "legal", "2"),
        ("acme", "", ""),
    ]


async def test_day_has_a_start(stack: Stack) -> None:
    stack.registry.usage_rows = [UsageRow(start_s=86400, requests=1, prompt_tokens=0, output_tokens=0, device_ns=0)]
    (row,) = (await ask(stack, group_by="day")).json()["data"]
    assert list(row) == ["start", "requests", "prompt_tokens", "output_tokens", "device_s"]
    assert row["start"] == "1970-01-02T00:00:00Z"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-02", 86400),
        ("1970-01-01T01:00:00Z", 3600),
        ("1970-01-01T01:00:00+01:00", 0),
        ("3600", 3600),
    ],
)
async def test_times_may_be_said_in_several_ways(stack: Stack, text: str, seconds: int) -> None:
    await ask(stack, **{"from": text})
    assert stack.registry.calls == [("usage", seconds, None, None, DEFAULT)]


@pytest.mark.parametrize(
    ("key", "asked", "seen"), [("acme", None, "acme"), ("acme", "acme", "acme"), ("admin", "x", "x")]
)
async def test_a_tenant_sees_its_own_and_an_admin_whomever_it_asks_for(
    stack: Stack, key: str, asked: str | None, seen: str
) -> None:
    assert (await ask(stack, key, **({} if asked is None else {"tenant": asked}))).status_code == 200
    assert stack.registry.calls == [("usage", None, None, seen, DEFAULT)]


async def test_another_tenants_use_is_refused(stack: Stack) -> None:
    response = await ask(stack, "other", tenant="acme")
    assert (response.status_code, stack.registry.calls) == (403, [])
    assert (await ask(stack, "scraper")).status_code == 403


async def test_an_admins_key_needs_no_other_scope(stack: Stack) -> None:
    RING.add("only admin", "root", Scope.ADMIN)
    access = stack.gateway.catalog.access
    assert access is not None
    stack.gateway.catalog.access = access.model_copy(update={"keys": tuple(RING.hashes)})
    assert (await ask(stack, "only admin")).status_code == 200


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"from": "yesterday"}, "from"),
        ({"to": "9" * 40}, "to"),
        ({"group_by": "model"}, "group_by"),
        ({"group_by": "day,hour"}, "group_by"),
        ({"format": "xml"}, "format"),
        ({"since": "1"}, "since"),
    ],
)
async def test_bad_question_is_a_400_that_names_it(stack: Stack, params: dict[str, str], param: str) -> None:
    response = await ask(stack, **params)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_report_that_is_cut_is_refused(stack: Stack) -> None:
    stack.registry.usage_is_whole = False
    response = await ask(stack)
    assert (response.status_code, error_of(response)["param"]) == (400, "group_by")
