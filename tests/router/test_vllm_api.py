"""vLLM's load and unload: its fields, texts and status codes, and one winner when a name is loaded twice at once."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.errors import Conflict, InvalidAdapter, SourceRefused
from registry.types import Activation, ActivationState, Fault
from tests.router.support import BASE_NAME, Stack, error_of, running

PATH = "/models/sql"


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "adapter_config.json").write_text("{}")
    return {"adapter_config.json": tmp_path / "adapter_config.json"}


async def load(stack: Stack, name: Any = "sql", path: Any = PATH, **more: Any) -> httpx.Response:
    return await stack.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


async def unload(stack: Stack, name: Any = "sql", **more: Any) -> httpx.Response:
    return await stack.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return response.status_code, error["type"], error["message"]


async def test_load_and_unload_answer_with_vllms_texts(folder: dict[str, Path]) -> None:
    async with running() as stack:
        stack.registry.sources[PATH] = folder
        loaded = await load(stack)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert ("push_source", "sql", PATH, None, "default", False) in stack.registry.calls
        assert ("wait_activation", 1, 60.0) in stack.registry.calls
        stack.registry.make_live("sql", 1)
        removed = await unload(stack, lora_int_id=7)
        assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert [call[:3] for call in stack.registry.calls if call[0] == "retire"] == [("retire", "sql", None)]


async def test_load_of_a_name_that_is_live_needs_load_inplace(folder: dict[str, Path]) -> None:
    async with running() as stack:
        stack.registry.sources[PATH] = folder
        await load(stack)
        stack.registry.make_live("sql", 1)
        words = "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set"
        status, kind, message = refusal(await load(stack))
        assert (status, kind, message[: len(words)]) == (400, "InvalidUserInput", words)
        assert (await load(stack, load_inplace=True)).status_code == 200


@pytest.mark.parametrize(("name", "path"), [("", PATH), ("sql", ""), ("", "")])
async def test_load_needs_name_and_path(name: str, path: str) -> None:
    async with running() as stack:
        expected = (400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        assert refusal(await load(stack, name, path)) == expected
        assert refusal(await unload(stack, ""))[:2] == (400, "InvalidUserInput")


async def test_path_without_an_adapter_and_unknown_name_are_404(folder: dict[str, Path]) -> None:
    async with running() as stack:
        status, kind, message = refusal(await load(stack, path="/models/nothing"))
        assert (status, kind) == (404, "NotFoundError")
        assert "No adapter found for /models/nothing" in message
        expected = (404, "NotFoundError", "The lora adapter 'nobody' cannot be found.")
        assert refusal(await unload(stack, "nobody")) == expected


async def test_hub_source_carries_its_commit() -> None:
    commit = "a" * 40
    async with running() as stack:
        await load(stack, path=f"hf://acme/sql@{commit}")
        assert stack.registry.calls == [("push_source", "sql", "hf://acme/sql", commit, "default", False)]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (SourceRefused("/etc is under none of the roots"), "source_refused", 400),
        (InvalidAdapter((Fault(code="dora", message="use_dora is true"),)), "invalid_adapter", 400),
        (Conflict("another owner"), "conflict", 409),
    ],
)
async def test_what_vllm_calls_an_internal_error_is_named(
    error: Exception, code: str, status: int, folder: dict[str, Path]
) -> None:
    async with running() as stack:
        stack.registry.sources[PATH] = folder
        stack.registry.push_error = error
        response = await load(stack)
        assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize("name", ["../x", "a/b", "-x", BASE_NAME, "n" * 65])
async def test_bad_name_is_refused_before_anything_is_fetched(name: str) -> None:
    async with running() as stack:
        assert (await load(stack, name)).status_code in (400, 409)
        assert stack.registry.calls == []


@pytest.mark.parametrize(
    "body", [{"lora_name": 1}, {"lora_name": "sql", "wat": 1}, {"lora_name": "sql", "load_inplace": "yes"}]
)
async def test_field_that_is_unknown_or_of_the_wrong_type_is_named(body: dict[str, Any]) -> None:
    async with running() as stack:
        response = await stack.http.post("/v1/load_lora_adapter", json=body)
        assert response.status_code == 400
        assert error_of(response)["param"] in body


async def test_expert_weights_are_refused() -> None:
    async with running() as stack:
        assert refusal(await load(stack, is_3d_lora_weight=True))[:2] == (400, "InvalidUserInput")


@pytest.mark.parametrize(("state", "status"), [("failed", 500), ("pending", 503), ("flipped", 200)])
async def test_end_of_the_activation_decides_the_answer(state: str, status: int, folder: dict[str, Path]) -> None:
    async with running() as stack:
        stack.registry.sources[PATH] = folder
        stack.registry.end_state = ActivationState(state)
        assert (await load(stack)).status_code == status


async def test_twenty_loads_of_one_name_at_once_have_one_winner(tmp_path: Path) -> None:
    async with running() as stack:
        registry = stack.registry
        for i in range(20):
            (tmp_path / f"{i}").write_text(str(i % 2))
            registry.sources[f"/models/{i}"] = {"adapter_config.json": tmp_path / f"{i}"}
        plain = registry.activate

        async def activate(name: str, alias: str, number: int, **more: Any) -> Activation:
            record = registry.records[name]
            await asyncio.sleep(0)
            if record.revision != more["expected_revision"] or registry.records[name].aliases:
                raise Conflict("the adapter has changed")
            registry.make_live(name, number)
            return await plain(name, alias, number, **more)

        registry.activate = activate  # type: ignore[method-assign]
        answers = await asyncio.gather(*(load(stack, path=f"/models/{i}") for i in range(20)))
        assert sorted(response.status_code for response in answers) == [200] + [400] * 19
