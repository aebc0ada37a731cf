"""Uploads that name a source instead of carrying files, and the fleet's template."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.errors import SourceNotFound, SourceRefused, SourceUnavailable
from tests.router.support import Stack, error_of, running

URL = "s3://adapters/sql"


async def push(stack: Stack, name: str = "sql", **body: Any) -> httpx.Response:
    return await stack.http.post(f"/v1/adapters/{name}/versions", json=body)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "adapter_config.json").write_text("{}")
    return {"adapter_config.json": tmp_path / "adapter_config.json"}


async def test_source_is_pushed_and_waited_for_like_an_upload(files: dict[str, Path]) -> None:
    async with running() as stack:
        stack.registry.sources[URL] = files
        first, again = await push(stack, source=URL), await push(stack, source=URL)
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json()["activation"]["state"] == "done"
        assert stack.registry.calls[0] == ("push_source", "sql", URL, None, "default", True)


async def test_source_takes_revision_and_flags(files: dict[str, Path]) -> None:
    async with running() as stack:
        stack.registry.sources["hf://acme/sql"] = files
        response = await push(stack, source="hf://acme/sql", revision="a" * 40, activate=False)
        assert response.json()["activation"] is None
        assert stack.registry.calls == [("push_source", "sql", "hf://acme/sql", "a" * 40, "default", False)]
        waiting = await push(stack, source="hf://acme/sql", wait=False)
        assert waiting.json()["activation"]["state"] == "pending"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "source"),
        ({"source": 1}, "source"),
        ({"source": ""}, "source"),
        ({"source": "x" * 1025}, "source"),
        ({"source": URL, "wat": 1}, "wat"),
        ({"source": URL, "activate": "true"}, "activate"),
    ],
)
async def test_field_that_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with running() as stack:
        response = await push(stack, **body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert stack.registry.calls == []


async def test_parameters_of_a_source_stand_in_the_body(files: dict[str, Path]) -> None:
    async with running() as stack:
        url = "/v1/adapters/sql/versions?activate=false"
        assert (await stack.http.post(url, json={"source": URL})).status_code == 400


@pytest.mark.parametrize(
    ("error", "status"),
    [(SourceRefused("no"), 400), (SourceNotFound("nothing"), 404), (SourceUnavailable("down"), 502)],
)
async def test_why_a_source_cannot_be_used_is_told(error: Any, status: int, files: dict[str, Path]) -> None:
    async with running() as stack:
        stack.registry.sources[URL] = files
        stack.registry.push_error = error
        response = await push(stack, source=URL)
        assert (response.status_code, error_of(response)["code"]) == (status, error.code)


async def test_bad_name_is_refused_before_anything_is_fetched() -> None:
    async with running() as stack:
        assert (await push(stack, "-x", source=URL)).status_code == 400
        assert stack.registry.calls == []


async def test_template_is_told() -> None:
    async with running() as stack:
        answer = (await stack.http.get("/v1/template")).json()
        assert answer["rules"] == {"policy": "warn", "ranks": [8], "targets": [], "dtypes": []}
        assert (answer["max_rank"], answer["targets"], answer["base"]) == (64, ["q_proj"], None)
