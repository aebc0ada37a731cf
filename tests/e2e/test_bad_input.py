"""Bad input to a real fleet: status and body of each, and the fleet serves on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny_fleet import TinyFleet
from tests.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, make_adapter, make_model

pytestmark = pytest.mark.serve
USER = [{"role": "user", "content": "Hi"}]

COMPLETIONS: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "unknown model": ({"model": "nobody"}, 404, "model_not_found", "model"),
    "unknown version": ({"model": "alpha@99"}, 404, "model_not_found", "model"),
    "prompt over the context": ({"prompt": "x" * (CONTEXT_LENGTH + 1)}, 400, "context_length_exceeded", "prompt"),
    "prompt and output over it": ({"max_tokens": CONTEXT_LENGTH}, 400, "context_length_exceeded", "prompt"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
    "n 0": ({"n": 0}, 400, "invalid_value", "n"),
    "logit_bias outside the vocabulary": ({"logit_bias": {str(VOCAB_SIZE): 1}}, 400, "invalid_value", "logit_bias"),
    "token ids outside the vocabulary": ({"prompt": [1, VOCAB_SIZE]}, 400, "invalid_value", "prompt"),
    "unsupported field": ({"suffix": "tail"}, 400, "unsupported_parameter", "suffix"),
    "unknown field": ({"temprature": 1}, 400, "unknown_parameter", "temprature"),
}
CHATS: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "empty messages": ({"messages": []}, 400, "invalid_value", "messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "Hi"}]}, 400, "invalid_value", "messages[0].role"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tools"),
}


def check(response: httpx.Response, status: int, code: str, param: str | None) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), response.text
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error


def serves_on(tiny: TinyFleet) -> None:
    body = {"model": "alpha", "prompt": "Hello", "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{tiny.fleet.url}/v1/completions", json=body, timeout=30).status_code == 200


@pytest.mark.parametrize("case", COMPLETIONS)
def test_bad_completion_is_refused(tiny_fleet: TinyFleet, case: str) -> None:
    fields, status, code, param = COMPLETIONS[case]
    body = {"model": "alpha", "prompt": "Hello", "max_tokens": 4, **fields}
    check(httpx.post(f"{tiny_fleet.fleet.url}/v1/completions", json=body), status, code, param)
    serves_on(tiny_fleet)


@pytest.mark.parametrize("case", CHATS)
def test_bad_chat_is_refused(tiny_fleet: TinyFleet, case: str) -> None:
    fields, status, code, param = CHATS[case]
    body = {"model": "alpha", "messages": USER, "max_tokens": 4, **fields}
    check(httpx.post(f"{tiny_fleet.fleet.url}/v1/chat/completions", json=body), status, code, param)
    serves_on(tiny_fleet)


def test_malformed_json_is_refused(tiny_fleet: TinyFleet) -> None:
    response = httpx.post(f"{tiny_fleet.fleet.url}/v1/completions", content=b'{"model": ')
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    serves_on(tiny_fleet)


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def with_tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


def first(tensors: dict[str, Any], part: str) -> str:
    return next(key for key in sorted(tensors) if part in key)


def drop_b(tensors: dict[str, Any]) -> None:
    del tensors[first(tensors, "lora_B")]


def wrong_shape(tensors: dict[str, Any]) -> None:
    key = first(tensors, "lora_A")
    tensors[key] = np.zeros((tensors[key].shape[0], 7), np.float32)


def one_nan(tensors: dict[str, Any]) -> None:
    tensors[first(tensors, "lora_B")][0, 0] = np.nan


def base_weight(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.model.norm.weight"] = np.ones(32, np.float32)


def rank_over_the_limit(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 300}))
    with_tensors(lambda tensors: tensors.update({key: grown(key, value) for key, value in tensors.items()}))(folder)


def grown(key: str, value: Any) -> Any:
    return np.ones((300, value.shape[1]) if "lora_A" in key else (value.shape[0], 300), np.float32)


UPLOADS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated safetensors": (truncated, "truncated"),
    "wrong shapes": (with_tensors(wrong_shape), "shape"),
    "missing lora_B": (with_tensors(drop_b), "lora_B"),
    "NaN weights": (with_tensors(one_nan), "NaN"),
    "a base weight among the tensors": (with_tensors(base_weight), "model.norm.weight"),
    "rank over the limit": (rank_over_the_limit, "300"),
}


def upload(tiny: TinyFleet, name: str, folder: Path) -> httpx.Response:
    files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    return httpx.post(f"{tiny.fleet.url}/v1/adapters/{name}/versions", files=files, timeout=60)


@pytest.mark.parametrize("case", UPLOADS)
def test_bad_upload_is_refused_and_leaves_nothing(tiny_fleet: TinyFleet, tmp_path: Path, case: str) -> None:
    break_it, said = UPLOADS[case]
    folder = make_adapter(tiny_fleet.base, ("q_proj", "v_proj"), 4, folder=tmp_path / "bad")
    break_it(folder)
    error = check(upload(tiny_fleet, "broken", folder), 400, "invalid_adapter", None)
    assert any(said in fault["message"] for fault in error["faults"]), error["faults"]
    assert httpx.get(f"{tiny_fleet.fleet.url}/v1/adapters/broken").status_code == 404
    serves_on(tiny_fleet)


def test_adapter_for_another_base_is_refused(tiny_fleet: TinyFleet, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", hidden_size=64, num_hidden_layers=3)
    folder = make_adapter(other, ("q_proj", "v_proj"), 4, folder=tmp_path / "foreign")
    error = check(upload(tiny_fleet, "foreign", folder), 400, "invalid_adapter", None)
    assert len(error["faults"]) > 1, "every fault at once"
    serves_on(tiny_fleet)


@pytest.mark.parametrize(
    "name", ["../x", "..%2Fx", "a%2Fb", "%2Fetc%2Fpasswd", "a%00b", "%C3%BC", "x" * 300, "%2E", "%2E%2E"]
)
def test_path_like_name_is_refused(tiny_fleet: TinyFleet, name: str) -> None:
    folder = tiny_fleet.adapters["alpha"]
    files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    url = httpx.URL(tiny_fleet.fleet.url).copy_with(raw_path=f"/v1/adapters/{name}/versions".encode())
    response = httpx.post(url, files=files)
    assert response.status_code in (400, 404), response.text
    assert "error" in response.json()
    serves_on(tiny_fleet)
