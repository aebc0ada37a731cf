"""Every kind of bad request: exact status, type, param and code, a message that names the field, nothing scheduled."""

import json
from typing import Any

import pytest

from replica.errors import AdapterUnavailable
from replica.messages import TokenChunk
from router.config import RequestLimits, RouterConfig
from router.schemas import HARMLESS
from tests.router.support import (
    BYTES,
    Stack,
    base_spec,
    delta,
    error_of,
    running,
    sentencepiece_tokenizer,
    sha256_of,
)
from tests.router.test_openai_api import says

INVALID = "invalid_request_error"
MANY = [f"stop{i}" for i in range(17)]

SHARED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"temperature": 2.5}, "temperature", "invalid_value", "temperature is 2.5; allowed: less than or equal to 2"),
    ({"temperature": -0.1}, "temperature", "invalid_value", "-0.1"),
    ({"temperature": "hot"}, "temperature", "invalid_type", '"hot"'),
    ({"temperature": True}, "temperature", "invalid_type", "true"),
    ({"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
    ({"top_p": 1.01}, "top_p", "invalid_value", "1.01"),
    ({"top_k": -2}, "top_k", "invalid_value", "-2"),
    ({"min_p": 1.5}, "min_p", "invalid_value", "1.5"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value", "2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value", "-2.1"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty", "invalid_value", "greater than or equal to 0.01"),
    ({"n": 0}, "n", "invalid_value", "n is 0; allowed: greater than or equal to 1"),
    ({"n": -1}, "n", "invalid_value", "-1"),
    ({"n": 17}, "n", "invalid_value", "n is 17; allowed: at most 16"),
    ({"n": 1.5}, "n", "invalid_type", "1.5"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value", "-1"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type", '"5"'),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "max_tokens is 0; allowed: at least 1"),
    ({"seed": 2**63}, "seed", "invalid_value", str(2**63)),
    ({"seed": "x"}, "seed", "invalid_type", '"x"'),
    ({"stop": ""}, "stop[0]", "invalid_value", "at least 1 character"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value", "at least 1 character"),
    ({"stop": 5}, "stop", "invalid_type", "5"),
    ({"stop": MANY}, "stop", "invalid_value", "17 strings; allowed: at most 16"),
    ({"stop": ["x" * 1001]}, "stop", "invalid_value", "1001"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "invalid_value", "'260'; allowed: token ids from 0 to 259"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value", "'-1'"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "invalid_value", "'cat'"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_value", "'²'"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value", "logit_bias has the key"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value", "101"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5", "invalid_type", '"x"'),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value", "1025"),
    ({"stop_token_ids": [260]}, "stop_token_ids", "invalid_value", "260; allowed: 0 to 259"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value", "-1"),
    ({"stream": "yes"}, "stream", "invalid_type", '"yes"'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "stream_options.x"),
    ({"wat": 1}, "wat", "unknown_parameter", "unknown parameter: 'wat'"),
    ({"store": True}, "store", "unsupported_parameter", "parameter 'store' is not supported"),
    ({"model": ""}, "model", "invalid_value", "at least 1 character"),
    ({"model": None}, "model", "invalid_type", "null"),
    ({"model": "x" * 600}, "model", "invalid_value", "512"),
    ({"user": 5}, "user", "invalid_type", "5"),
]

CHAT: list[tuple[dict[str, Any], str, str, str]] = [
    ({"messages": []}, "messages", "invalid_value", "at least 1 item"),
    ({"messages": "hi"}, "messages", "invalid_type", '"hi"'),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value", '"wizard"'),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value", '"tool"'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type", "null"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value", "list of"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "invalid_value",
        '{"type": "text", "text": "..."} parts',
    ),
    ({"messages": [{"role": "user", "content": "x", "wat": 1}]}, "messages[0].wat", "unknown_parameter", "wat"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        "unsupported_parameter",
        "tool_calls",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "'tools' is not supported"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter", "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter", "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "response_format"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter", "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter", "modalities"),
    ({"prompt": "hi"}, "prompt", "unknown_parameter", "prompt"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value", "max_completion_tokens is 0"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value", "send one"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "at most 20"),
    ({"logprobs": 5}, "logprobs", "invalid_type", "5"),
    ({"max_tokens": 257}, "messages", "context_length_exceeded", "context is 256 tokens; the prompt has 20"),
    (
        {"messages": [{"role": "user", "content": "x" * 300}]},
        "messages",
        "context_length_exceeded",
        "the prompt has 318; shorten",
    ),
]

COMPLETION: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt": None}, "prompt", "invalid_value", "prompt is null; allowed: a string, a list of strings"),
    ({"prompt": []}, "prompt", "invalid_value", "prompt is []"),
    ({"prompt": [[]]}, "prompt", "invalid_value", "prompt is [[]]"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_value", "a list of strings"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value", "a list of token ids"),
    ({"prompt": [1, True]}, "prompt", "invalid_value", "a list of token ids"),
    ({"prompt": [1.5]}, "prompt", "invalid_value", "1.5"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value", "a string"),
    ({"prompt": [260]}, "prompt", "invalid_value", "prompt has the token id 260; allowed: 0 to 259"),
    ({"prompt": [[1], [-1]]}, "prompt", "invalid_value", "-1"),
    ({"prompt": ["x"] * 129}, "prompt", "invalid_value", "129; allowed: at most 128 prompts"),
    ({"prompt": [1] * 257}, "prompt", "context_length_exceeded", "the prompt has 257; shorten"),
    ({"prompt": [1] * 256}, "prompt", "context_length_exceeded", "the prompt has 256; shorten"),
    ({"prompt": [1] * 200, "max_tokens": 57}, "prompt", "context_length_exceeded", "max_tokens asks for 57"),
    ({"prompt": ["x", "y" * 300]}, "prompt", "context_length_exceeded", "301"),
    ({"logprobs": 21}, "logprobs", "invalid_value", "at most 20"),
    ({"logprobs": True}, "logprobs", "invalid_type", "true"),
    ({"best_of": 3, "n": 2}, "best_of", "unsupported_parameter", "the value of n, which is 2"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter", "suffix"),
    ({"messages": []}, "messages", "unknown_parameter", "messages"),
    ({"max_tokens": 0, "echo": False}, "max_tokens", "invalid_value", "0 with echo=true"),
]


async def check(path: str, base: dict[str, Any], case: tuple[dict[str, Any], str, str, str]) -> None:
    fields, param, code, message = case
    async with running() as stack:
        for stream in ({}, {"stream": True}):
            if "stream" in fields or ("stream_options" in fields and stream):
                stream = {}
            response = await stack.http.post(path, json=base | stream | fields)
            error = error_of(response)
            assert response.status_code == 400, response.text
            assert (error["param"], error["code"], error["type"]) == (param, code, INVALID), error
            assert message in error["message"]
        assert stack.fleet.requests == [], "a refused request must not reach a replica"


def name_of(case: object) -> str:
    return json.dumps(case)[:60] if isinstance(case, dict) else ""


@pytest.mark.parametrize("case", [*SHARED, *CHAT], ids=lambda case: name_of(case[0]))
async def test_bad_chat_request_is_refused(case: tuple[dict[str, Any], str, str, str]) -> None:
    await check("/v1/chat/completions", {"model": "legal", "messages": [{"role": "user", "content": "hi"}]}, case)


@pytest.mark.parametrize("case", [*SHARED, *COMPLETION], ids=lambda case: name_of(case[0]))
async def test_bad_completion_request_is_refused(case: tuple[dict[str, Any], str, str, str]) -> None:
    await check("/v1/completions", {"model": "legal", "prompt": "hi"}, case)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b"nope", b'{"a":1', b"\xff\xfe", b'{"model": "\\ud800"}'])
async def test_body_that_is_no_json_is_refused(path: str, body: bytes) -> None:
    async with running() as stack:
        response = await stack.http.post(path, content=body)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_json"
        assert error_of(response)["message"].startswith("the body is not valid JSON")


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"null", b"5"])
async def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    async with running() as stack:
        response = await stack.http.post("/v1/completions", content=body)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_type")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
async def test_numbers_that_are_not_finite_are_refused(number: bytes) -> None:
    async with running() as stack:
        body = b'{"model":"legal","prompt":"x","temperature":' + number + b"}"
        assert (await stack.http.post("/v1/completions", content=body)).status_code == 400


async def test_missing_fields_are_all_named() -> None:
    async with running() as stack:
        response = await stack.http.post("/v1/completions", json={})
        error = error_of(response)
        assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
        assert "'model'" in error["message"]
        assert "'prompt'" in error["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_body_over_the_limit_is_413(declared: bool) -> None:
    async with running(RouterConfig(requests=RequestLimits(max_body_bytes=200))) as stack:

        async def pieces() -> Any:
            for _ in range(10):
                yield b"x" * 50

        response = await stack.http.post("/v1/completions", content=b"x" * 500 if declared else pieces())
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert "200" in error_of(response)["message"]


async def test_content_type_does_not_matter() -> None:
    async with running() as stack:
        stack.fleet.script = says("x")
        for kind in ("text/plain", "application/json; charset=utf-8", ""):
            response = await stack.http.post(
                "/v1/completions", content=b'{"model":"legal","prompt":"x"}', headers={"content-type": kind}
            )
            assert response.status_code == 200


async def test_harmless_fields_and_nulls_are_accepted() -> None:
    values: dict[str, Any] = {"metadata": {"team": "a"}, "parallel_tool_calls": True}
    harmless = {name: values.get(name, "x") for name in HARMLESS}
    neutral = {
        "store": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "reasoning_effort": None,
    }
    nulls = dict.fromkeys(
        (
            "stream",
            "stream_options",
            "max_tokens",
            "n",
            "stop",
            "seed",
            "temperature",
            "top_p",
            "logit_bias",
            "logprobs",
        )
    )
    async with running() as stack:
        stack.fleet.script = says("x")
        assert (await stack.chat(**harmless, **neutral, **nulls, top_logprobs=None)).status_code == 200
        assert (await stack.complete(**harmless, **nulls, suffix="", best_of=1, echo=None)).status_code == 200


async def test_messages_may_be_parts_and_old_answers() -> None:
    async with running() as stack:
        stack.fleet.script = says("x")
        messages = [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}],
                "name": "ann",
            },
            {
                "role": "assistant",
                "content": "hi",
                "refusal": None,
                "tool_calls": None,
                "annotations": [],
                "audio": None,
            },
            {"role": "user", "content": ""},
        ]
        response = await stack.chat(messages=messages)
        assert response.status_code == 200, response.text
        prompt = stack.fleet.requests[0][1].prompt
        assert BYTES.decode(prompt) == "[system]be brief[user]hello[assistant]hi[user][assistant]"


async def test_complaint_of_the_template_is_a_400() -> None:
    spec = base_spec(chat_template="{{ raise_exception('only one turn, please') }}")
    async with running(catalog=delta(base=spec)) as stack:
        response = await stack.chat()
        assert (response.status_code, error_of(response)["param"]) == (400, "messages")
        assert "only one turn, please" in error_of(response)["message"]


async def test_prompt_without_tokens_is_refused() -> None:
    stack = Stack()
    tokenizer = sentencepiece_tokenizer()
    stack.registry.blobs = {sha256_of(tokenizer): tokenizer.to_str().encode()}
    await stack.gateway.apply(delta(base=base_spec(tokenizer_sha256=sha256_of(tokenizer))))
    response = await stack.complete(prompt="")
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert "no tokens" in error_of(response)["message"]


async def test_stop_token_ids_are_limited() -> None:
    async with running() as stack:
        answer = await stack.chat(stop_token_ids=[5] * 1000)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [-1] * 10_000}, {f"x{index}": 1 for index in range(10_000)}], ids=["values", "names"]
)
async def test_answer_to_many_faults_is_short(fields: dict[str, Any]) -> None:
    async with running() as stack:
        answer = await stack.chat(**fields)
        assert answer.status_code == 400
        assert len(answer.content) < 1000


async def test_error_of_a_replica_survives_echo_with_logprobs() -> None:
    error = AdapterUnavailable("the weights are gone")
    async with running() as stack:
        stack.fleet.script = lambda replica_id, request: [
            [TokenChunk(request.request_id, 0, (), finish_reason="error", error=error)]
        ]
        answer = await stack.complete(echo=True, logprobs=1, max_tokens=3)
        assert answer.json()["error"]["code"] == "adapter_unavailable"
