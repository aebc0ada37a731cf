"""The OpenAI endpoints over a scripted fleet: answers, streams, and what happens when a client leaves."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from registry.errors import StagingFailed
from registry.types import VersionState
from replica.errors import AdapterUnavailable, EngineDead, Overloaded, ReplicaDraining
from replica.messages import GenerateRequest, TokenChunk, TokenLogprob
from router.config import PlacementConfig, RequestLimits, RouterConfig
from router.errors import ReplicaGone
from router.readiness import FRESH_S
from tests.metrics_text import sum_of
from tests.router.fakes import Message, Script, one_choice
from tests.router.support import (
    BASE_NAME,
    Stack,
    adapter_record,
    delta,
    digest,
    error_of,
    events,
    ids_of,
    running,
    streamed_text,
    version_record,
)


def says(*pieces: str | tuple[int, ...], reason: str = "stop") -> Script:
    """Every replica answers with these pieces, one message each."""
    tokens = [ids_of(piece) if isinstance(piece, str) else piece for piece in pieces]
    return lambda replica_id, request: one_choice(request.request_id, tokens, reason)


def with_logprobs(text: str, top: int = 2, reason: str = "length") -> Script:
    """One message a token; token i has the log-probability -i - 0.5 and `top` alternatives."""

    def script(replica_id: str, request: GenerateRequest) -> Sequence[Message]:
        ids = ids_of(text)
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None:
            prompt_logprobs = (None, *(TokenLogprob(i, -2.0, ((i, -2.0),)) for i in request.prompt[1:]))
        messages = []
        for place, token_id in enumerate(ids):
            alternatives = tuple((other, -float(other)) for other in range(65, 65 + top))
            entry = TokenLogprob(token_id, -place - 0.5, alternatives)
            end = reason if place == len(ids) - 1 else None
            first = prompt_logprobs if place == 0 else None
            messages.append((TokenChunk(request.request_id, 0, (token_id,), (entry,), first, end),))  # type: ignore[arg-type]
        return messages

    return script


async def test_chat_answer_has_the_shape_of_openai() -> None:
    async with running() as stack:
        stack.fleet.script = says("Hel", "lo")
        response = await stack.chat()
        body = response.json()
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert body.pop("id").startswith("chatcmpl-")
        assert body.pop("created") > 0
        assert body == {
            "object": "chat.completion",
            "model": "legal",
            "system_fingerprint": f"fp_{digest(1001)[:16]}",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
        }


async def test_completion_answer_has_the_shape_of_openai() -> None:
    async with running() as stack:
        stack.fleet.script = says("Hello", reason="length")
        body = (await stack.complete()).json()
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


async def test_request_carries_the_digest_and_the_sampling() -> None:
    async with running() as stack:
        stack.fleet.script = says("x")
        await stack.complete(
            prompt=[1, 2, 3],
            max_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            seed=5,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.2,
            logit_bias={"65": -100, "66": 1.5},
            stop_token_ids=[4],
            ignore_eos=True,
        )
        _, request = stack.fleet.requests[0]
        assert (request.tenant, request.adapter, request.prompt) == ("default", digest(1001), (1, 2, 3))
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 0)
        assert (sampling.min_p, sampling.seed, sampling.presence_penalty) == (0.1, 5, 1.0)
        assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-1.0, 1.2)
        assert sampling.logit_bias == {65: -100.0, 66: 1.5}
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((4,), True, None)


async def test_base_goes_without_an_adapter_and_max_tokens_fills_the_context() -> None:
    async with running() as stack:
        stack.fleet.script = says("x")
        response = await stack.complete(model=BASE_NAME, prompt="abc")
        _, request = stack.fleet.requests[0]
        assert request.adapter is None
        assert request.sampling.max_tokens == 256 - 4
        assert response.json()["system_fingerprint"] == f"fp_{digest(1)[:16]}"


async def test_default_max_tokens_caps_what_the_client_left_open() -> None:
    config = RouterConfig(requests=RequestLimits(default_max_tokens=9))
    async with running(config) as stack:
        stack.fleet.script = says("x")
        await stack.complete()
        await stack.complete(prompt="a" * 250)
        await stack.chat(max_completion_tokens=3)
        assert [request.sampling.max_tokens for _, request in stack.fleet.requests] == [9, 5, 3]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        (["Hello", " wor", "ld"], None),
        (["na", "ïve 👩‍👩‍👧 你好"], None),
        (["alpha be", "ta ", "gam", "ma delta"], ["beta gamma"]),
        (["alpha be", "ta ", "gam"], "beta gamma"),
        (["x", "a", "b", "c"], ["ab", "b"]),
        (["caf", "é…", " more"], ["é…"]),
        (['quote " back\\slash \n tab\t', "\u2028 \x00 end"], None),
    ],
)
async def test_stream_concatenates_to_the_whole_answer(endpoint: str, pieces: list[str], stop: Any) -> None:
    by_byte = [(token_id,) for token_id in ids_of("".join(pieces))]
    for messages in (pieces, by_byte):
        async with running() as stack:
            stack.fleet.script = says(*messages, reason="length")
            call = stack.chat if endpoint == "chat" else stack.complete
            whole = (await call(stop=stop)).json()["choices"][0]
            chunks = events(await call(stop=stop, stream=True))
            text = whole["message"]["content"] if endpoint == "chat" else whole["text"]
            assert streamed_text(chunks) == text
            reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
            assert reasons[-1] == whole["finish_reason"]
            assert all(reason is None for reason in reasons[:-1])
            joined = "".join(pieces)
            stops = [stop] if isinstance(stop, str) else stop or []
            found = [joined.find(s) for s in stops if s in joined]
            assert text == (joined[: min(found)] if found else joined)
            assert whole["finish_reason"] == ("stop" if found else "length")


async def test_stream_starts_with_the_role_and_ends_with_usage_when_asked() -> None:
    async with running() as stack:
        stack.fleet.script = says("a", "b")
        chunks = events(await stack.chat(stream=True, stream_options={"include_usage": True}))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
        assert len({(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
        assert "usage" not in events(await stack.chat(stream=True))[0]


async def test_character_cut_off_by_max_tokens_is_flushed_at_the_end() -> None:
    async with running() as stack:
        stack.fleet.script = says(ids_of("ok😀")[:4], reason="length")
        whole = (await stack.complete()).json()["choices"][0]["text"]
        assert whole == "ok\ufffd"
        assert streamed_text(events(await stack.complete(stream=True))) == whole


async def test_stop_string_closes_the_stream_and_counts_tokens_up_to_it() -> None:
    async with running() as stack:
        stack.fleet.script = says("ab", "cSTOPdef", "ghi")
        stack.fleet.hang = True
        body = (await stack.complete(stop="STOP")).json()
        assert body["choices"][0]["text"] == "abc"
        assert body["usage"]["completion_tokens"] == len("abcSTOP")
        assert len(stack.fleet.closed) == 1
        assert stack.fleet.stopped == []


def two_choices(replica_id: str, request: GenerateRequest) -> list[Message]:
    def chunk(index: int, text: str, reason: Any = None) -> TokenChunk:
        return TokenChunk(request.request_id, index, ids_of(text), finish_reason=reason)

    return [
        (chunk(0, "a"), chunk(1, "x")),
        (chunk(1, "y", "length"),),
        (chunk(0, "bS"),),
        (chunk(0, "Tc"),),
        (chunk(0, "d", "length"),),
    ]


async def test_choices_keep_their_index_and_their_own_finish_reason() -> None:
    async with running() as stack:
        stack.fleet.script = two_choices
        choices = (await stack.complete(n=2)).json()["choices"]
        assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
            (0, "abSTcd", "length"),
            (1, "xy", "length"),
        ]
        chunks = events(await stack.chat(n=2, stream=True))
        assert [streamed_text(chunks, i) for i in (0, 1)] == ["abSTcd", "xy"]
        roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
        assert roles == [0, 1]


def three_choices(replica_id: str, request: GenerateRequest) -> list[Message]:
    first, *rest = two_choices(replica_id, request)
    return [first, (TokenChunk(request.request_id, 2, ids_of("zST")),), *rest]


async def test_one_choice_stopped_by_a_string_is_stopped_on_the_replica() -> None:
    async with running() as stack:
        stack.fleet.script = three_choices
        body = (await stack.complete(n=3, stop="ST")).json()
        assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
            ("ab", "stop"),
            ("xy", "length"),
            ("z", "stop"),
        ]
        replica_id, request = stack.fleet.requests[0]
        assert stack.fleet.stopped == [(replica_id, request.request_id, 2)]
        assert body["usage"]["completion_tokens"] == len("abST" + "xy" + "zST")


async def test_several_prompts_give_choices_in_order_of_prompt() -> None:
    async with running() as stack:
        stack.fleet.script = lambda replica_id, request: [
            tuple(
                TokenChunk(request.request_id, i, request.prompt + ids_of(str(i)), finish_reason="stop") for i in (0, 1)
            )
        ]
        prompts = [list(ids_of(text)) for text in ("one", "two", "three")]
        body = (await stack.complete(prompt=prompts, n=2)).json()
        expected = ["one0", "one1", "two0", "two1", "three0", "three1"]
        assert [c["text"] for c in body["choices"]] == expected
        assert [c["index"] for c in body["choices"]] == list(range(6))
        assert body["usage"]["prompt_tokens"] == 11
        chunks = events(await stack.complete(prompt=prompts, n=2, stream=True))
        assert [streamed_text(chunks, i) for i in range(6)] == expected
        assert len({request.request_id for _, request in stack.fleet.requests}) == 6


async def test_error_of_one_prompt_ends_the_others() -> None:
    async with running() as stack:
        stack.fleet.hang = True
        stack.fleet.script = lambda replica_id, request: (
            [AdapterUnavailable("broken")] if request.prompt == (1,) else [(TokenChunk(request.request_id, 0, (65,)),)]
        )
        response = await stack.complete(prompt=[[2, 3], [1], [3, 4]])
        assert response.status_code == 503
        assert error_of(response)["code"] == "adapter_unavailable"


async def test_chat_logprobs_follow_the_chat_schema() -> None:
    async with running() as stack:
        stack.fleet.script = with_logprobs("é!", top=2)
        choice = (await stack.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
        assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert [entry["logprob"] for entry in content] == [-0.5, -1.5, -2.5]
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
        assert content[0]["top_logprobs"][0] == {"token": "b", "logprob": -65.0, "bytes": [ord("b")]}
        chunks = events(await stack.chat(logprobs=True, top_logprobs=2, stream=True))
        streamed = [e for c in chunks for e in ((c["choices"][0]["logprobs"] or {}).get("content") or [])]
        assert streamed == content


async def test_chat_logprobs_without_top_logprobs_list_no_alternatives() -> None:
    async with running() as stack:
        stack.fleet.script = with_logprobs("ab", top=0)
        choice = (await stack.chat(logprobs=True, top_logprobs=None)).json()["choices"][0]
        assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
        assert stack.fleet.requests[0][1].sampling.logprobs == 0


async def test_completion_logprobs_follow_the_completion_schema() -> None:
    async with running() as stack:
        stack.fleet.script = with_logprobs("aé!", top=1)
        logprobs = (await stack.complete(logprobs=1)).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5]
        assert logprobs["text_offset"] == [0, 1, 1, 2]
        assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2, 2]
        assert logprobs["top_logprobs"][0]["a"] == -0.5
        chunks = events(await stack.complete(logprobs=1, stream=True))
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        for key in logprobs:
            assert [value for part in parts for value in part[key]] == logprobs[key]


async def test_logprobs_of_held_back_tokens_come_with_their_text_and_a_stop_keeps_its_own() -> None:
    async with running() as stack:
        stack.fleet.script = with_logprobs("abSTxSTOPz")
        choice = (await stack.complete(logprobs=0, stop="STOP")).json()["choices"][0]
        assert choice["text"] == "abSTx"
        assert choice["logprobs"]["tokens"] == list("abSTx")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert choice["logprobs"]["top_logprobs"] is None


async def test_infinite_logprobs_stay_valid_json() -> None:
    async with running() as stack:
        entry = TokenLogprob(65, -math.inf, ((66, -math.inf), (67, math.nan)))
        stack.fleet.script = lambda replica_id, request: [
            (TokenChunk(request.request_id, 0, (65,), (entry,), finish_reason="stop"),)
        ]
        response = await stack.chat(logprobs=True, top_logprobs=2)
        content = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
        assert content[0]["logprob"] == -9999.0
        assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-9999.0, -9999.0]


@pytest.mark.parametrize("prompt", ["hi é", list(ids_of("hi é")), [256, *ids_of("hi é")]])
async def test_echo_repeats_the_prompt_in_answer_and_stream(prompt: Any) -> None:
    async with running() as stack:
        stack.fleet.script = says("A", "B")
        whole = (await stack.complete(prompt=prompt, echo=True, n=1)).json()["choices"][0]["text"]
        assert whole == "hi éAB"
        assert streamed_text(events(await stack.complete(prompt=prompt, echo=True, stream=True))) == whole


async def test_echo_with_logprobs_covers_the_prompt_and_offsets_go_on() -> None:
    async with running() as stack:
        stack.fleet.script = with_logprobs("XY", top=1)
        choice = (await stack.complete(prompt="hé", echo=True, logprobs=1)).json()["choices"][0]
        assert choice["text"] == "héXY"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9", "X", "Y"]
        assert logprobs["token_logprobs"] == [None, -2.0, -2.0, -2.0, -0.5, -1.5]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]


async def test_offsets_of_an_echo_count_special_tokens_that_the_client_wrote() -> None:
    async with running() as stack:
        stack.fleet.script = with_logprobs("X", top=0)
        prompt = "a<s>b</s></s>c"
        choice = (await stack.complete(prompt=prompt, echo=True, logprobs=0)).json()["choices"][0]
        assert choice["text"] == prompt + "X"
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert tokens == ["<s>", "a", "<s>", "b", "</s>", "</s>", "c", "X"]
        assert offsets == [0, 0, 1, 4, 5, 9, 13, 14]
        assert all(choice["text"].startswith(token, at) for token, at in list(zip(tokens, offsets, strict=True))[1:])


async def test_echo_of_nothing_but_the_prompt_scores_it() -> None:
    async with running() as stack:

        def script(replica_id: str, request: GenerateRequest) -> list[Message]:
            scores = (None, *(TokenLogprob(i, -1.0) for i in request.prompt[1:]))
            return [(TokenChunk(request.request_id, 0, (), (), scores, "length"),)]

        stack.fleet.script = script
        body = (await stack.complete(prompt="ab", echo=True, logprobs=0, max_tokens=0)).json()
        assert stack.fleet.requests[0][1].sampling.max_tokens == 0
        assert body["choices"][0]["text"] == "ab"
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


async def test_echo_waits_for_prompt_logprobs_when_another_choice_comes_first() -> None:
    async with running() as stack:

        def script(replica_id: str, request: GenerateRequest) -> list[Message]:
            scores = (None, *(TokenLogprob(i, -1.0) for i in request.prompt[1:]))
            one = TokenLogprob(65, -1.0)
            return [
                (TokenChunk(request.request_id, 1, (65,), (one,), None, "length"),),
                (TokenChunk(request.request_id, 0, (65,), (one,), scores, "length"),),
            ]

        stack.fleet.script = script
        choices = (await stack.complete(prompt="ab", echo=True, logprobs=0, n=2)).json()["choices"]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [4, 4]


class Client:
    """A raw ASGI client that may leave: drives the application message by message."""

    def __init__(self, stack: Stack, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._stack = stack
        self._asked = False
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("c", 1),
            "server": ("s", 80),
            "state": {},
        }

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def start(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self._stack.app(self._scope, self._receive, self._send))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (the fakes know no events)
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
@pytest.mark.parametrize("answered", [True, False])
async def test_disconnect_aborts_on_the_replica_and_gives_everything_back(
    stream: bool, prompt: Any, answered: bool
) -> None:
    async with running() as stack:
        stack.fleet.hang = True
        if answered:
            stack.fleet.script = lambda replica_id, request: [(TokenChunk(request.request_id, 0, (65,)),)]
        body = {"model": "legal", "prompt": prompt, "stream": stream}
        client = Client(stack, "/v1/completions", body)
        task = client.start()
        await until(lambda: stack.fleet.num_open == (2 if isinstance(prompt, list) else 1))
        if answered and stream:
            await until(lambda: len(client.sent) > 1)
        client.gone.set()
        async with asyncio.timeout(1):
            await task
        assert len(stack.fleet.closed) == len(stack.fleet.requests)
        assert all(message.get("status") != 500 for message in client.sent)
        assert sum_of(stack.gateway.metrics.exposition(), "lorafleet_requests_total", outcome="disconnect") == 1


async def test_server_shutdown_gives_everything_back() -> None:
    async with running() as stack:
        stack.fleet.hang = True
        task = Client(stack, "/v1/completions", {"model": "legal", "prompt": "x"}).start()
        await until(lambda: stack.fleet.num_open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_request_timeout_keeps_its_status_before_the_first_token_and_is_an_event_after() -> None:
    config = RouterConfig(requests=RequestLimits(request_timeout_s=0.05))
    async with running(config) as stack:
        stack.fleet.hang = True
        early = await stack.complete(stream=True)
        assert (early.status_code, error_of(early)["code"]) == (504, "request_timeout")
        stack.fleet.script = lambda replica_id, request: [(TokenChunk(request.request_id, 0, (65,)),)]
        late = events(await stack.complete(stream=True))
        assert late[-1]["error"]["code"] == "request_timeout"
        assert (await stack.complete()).status_code == 504


@pytest.mark.parametrize(
    "error", [ReplicaGone("gone"), ReplicaDraining("draining"), EngineDead("dead"), Overloaded("full")]
)
@pytest.mark.parametrize("as_chunk", [True, False])
async def test_request_is_tried_elsewhere_before_its_first_token(error: Exception, as_chunk: bool) -> None:
    async with running() as stack:
        home = stack.gateway.placement.policy.home("legal")
        assert home is not None

        def script(replica_id: str, request: GenerateRequest) -> Sequence[Message | Exception]:
            if replica_id != home.replica_id:
                return says("fine")(replica_id, request)
            if as_chunk:
                return [(TokenChunk(request.request_id, 0, (), finish_reason="error", error=error),)]
            return [error]

        stack.fleet.script = script
        response = await stack.complete()
        assert response.json()["choices"][0]["text"] == "fine"
        assert [replica_id for replica_id, _ in stack.fleet.requests] == [
            home.replica_id,
            "r1" if home.replica_id == "r0" else "r0",
        ]


async def test_tries_are_bounded_and_the_last_error_is_told() -> None:
    config = RouterConfig(placement=PlacementConfig(max_tries=2))
    async with running(config, delta(num_replicas=5)) as stack:
        stack.fleet.script = lambda replica_id, request: [Overloaded("the waiting queue is full")]
        response = await stack.complete()
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert error_of(response) == {
            "message": "the waiting queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "overloaded",
        }
        assert len({replica_id for replica_id, _ in stack.fleet.requests}) == 2


async def test_only_replica_gone_is_the_error_when_there_is_no_other() -> None:
    async with running(catalog=delta(num_replicas=1)) as stack:
        stack.fleet.script = lambda replica_id, request: [ReplicaGone("replica r0 died")]
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (503, "replica_gone")


async def test_failing_adapter_is_not_tried_elsewhere() -> None:
    async with running() as stack:
        stack.fleet.script = lambda replica_id, request: [AdapterUnavailable("bytes do not match")]
        response = await stack.complete(stream=True)
        assert (response.status_code, error_of(response)["code"]) == (503, "adapter_unavailable")
        assert len(stack.fleet.requests) == 1


@pytest.mark.parametrize("error", [ReplicaGone("replica r0 died"), ZeroDivisionError("secret detail")])
async def test_error_after_the_first_token_becomes_an_event(error: Exception) -> None:
    async with running() as stack:
        stack.fleet.script = lambda replica_id, request: [(TokenChunk(request.request_id, 0, (65,)),), error]
        chunks = events(await stack.chat(stream=True))
        assert chunks[-1]["error"]["type"] == "server_error"
        assert chunks[-1]["error"]["code"] == ("replica_gone" if isinstance(error, ReplicaGone) else "internal_error")
        assert "secret" not in json.dumps(chunks[-1])
        assert len(stack.fleet.requests) == 1


async def test_aborted_request_is_an_error_and_never_an_answer() -> None:
    async with running() as stack:
        stack.fleet.script = says("par", "tial", reason="abort")
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (503, "request_aborted")


async def test_stream_that_ends_early_is_an_error() -> None:
    async with running() as stack:
        stack.fleet.script = lambda replica_id, request: [(TokenChunk(request.request_id, 0, (65,)),)]
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (503, "replica_gone")


async def test_unexpected_error_is_a_500_that_tells_nothing() -> None:
    async with running() as stack:
        stack.fleet.script = lambda replica_id, request: [ZeroDivisionError("secret detail")]
        response = await stack.complete()
        assert response.status_code == 500
        assert "secret" not in response.text
        assert error_of(response)["code"] == "internal_error"
        assert response.headers["x-request-id"]


async def test_concurrent_limit_is_a_429_with_retry_after() -> None:
    config = RouterConfig(requests=RequestLimits(max_concurrent_requests=2))
    async with running(config) as stack:
        stack.fleet.script = says("x")
        response = await stack.complete(prompt=["a", "b", "c"], stream=True)
        assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
        assert response.headers["retry-after"] == "1"
        assert (await stack.complete(prompt=["a", "b"])).status_code == 200


async def test_version_is_resolved_once_and_alias_moves_do_not_touch_running_requests() -> None:
    both = adapter_record("legal", live=1, num_versions=2, canary=2)
    async with running(catalog=delta([both])) as stack:
        stack.fleet.script = says("x")
        for model in ("legal", "legal@2", "legal@canary", "legal@live"):
            await stack.complete(model=model)
        await stack.gateway.apply(delta([both.model_copy(update={"aliases": {"live": 2}})], revision=2))
        await stack.complete(model="legal")
        digests = [request.adapter for _, request in stack.fleet.requests]
        assert digests == [digest(1000 + n) for n in (1, 2, 2, 1, 2)]


@pytest.mark.parametrize(
    "name", ["a:b", "a/b", "a%2Fb", "ü", "x" * 300, "legal@9", "legal@", "Legal", "@1", "../legal"]
)
async def test_unknown_model_is_404_and_never_the_base(name: str) -> None:
    async with running() as stack:
        for call in (stack.chat, stack.complete):
            response = await call(model=name)
            assert response.status_code == (404 if len(name) <= 512 else 400)
            assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")
        assert stack.fleet.requests == []


async def test_base_name_with_a_colon_is_matched_exactly() -> None:
    stack = Stack(base_names=["gpt-oss:120b", "org/model"])
    await stack.gateway.apply(delta())
    stack.fleet.script = says("x")
    assert (await stack.complete(model="gpt-oss:120b")).status_code == 200
    assert (await stack.complete(model="org/model")).status_code == 200
    assert (await stack.complete(model="gpt-oss")).status_code == 404
    assert (await stack.http.get("/v1/models/org/model")).json()["id"] == "org/model"
    assert (await stack.http.get("/v1/models/org%2Fmodel")).json()["id"] == "org/model"


async def test_models_lists_what_resolves_with_residency() -> None:
    half = adapter_record("half", live=None, num_versions=1, canary=1)
    gone = adapter_record("gone").model_copy(update={"versions": (version_record(1, VersionState.RETIRED),)})
    async with running(catalog=delta([adapter_record("legal"), half, gone])) as stack:
        body = (await stack.http.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [model["id"] for model in body["data"]] == [BASE_NAME, "half@canary", "legal"]
        base, _, legal = body["data"]
        assert base["parent"] is None
        assert (legal["parent"], legal["root"], legal["resident_on"]) == (BASE_NAME, "legal@1", [])
        for model in body["data"]:
            assert (await stack.http.get(f"/v1/models/{model['id']}")).json() == model
        assert (await stack.http.get("/v1/models/legal@1")).json()["id"] == "legal@1"
        missing = await stack.http.get("/v1/models/gone")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_not_ready_until_base_tokenizer_and_replica_are_there() -> None:
    stack = Stack()
    for expected, change in (
        (["base", "tokenizer", "replica"], None),
        (["base", "tokenizer"], delta(has_base=False)),
        (["replica"], delta(num_replicas=0, revision=2)),
    ):
        if change is not None:
            await stack.gateway.apply(change)
        ready = await stack.http.get("/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, expected)
        response = await stack.complete()
        assert response.status_code == 503
        assert error_of(response)["code"] == ("no_replica" if expected == ["replica"] else "not_ready")
        assert (await stack.http.get("/health")).status_code == 200
    await stack.gateway.apply(delta(revision=3))
    assert (await stack.http.get("/ready")).json() == {"ready": True, "missing": [], "revision": 3}
    replica_ids = {replica.replica_id for replica in stack.gateway.catalog.replicas}
    for stuck, status in ((replica_ids - {min(replica_ids)}, 200), (replica_ids, 503), (set(), 200)):
        stack.fleet.stuck = set(stuck)
        await asyncio.sleep(FRESH_S)
        ready = await stack.http.get("/ready")
        assert (ready.status_code, ready.json()["missing"]) == (status, [] if status == 200 else ["replica"])
        assert (await stack.http.get("/health")).status_code == 200
    stack.check_idle()


async def test_apply_that_cannot_fetch_the_tokenizer_changes_nothing_and_can_be_repeated() -> None:
    stack = Stack()
    blobs, stack.registry.blobs = stack.registry.blobs, {}
    with pytest.raises(KeyError):
        await stack.gateway.apply(delta())
    assert stack.gateway.catalog.revision == 0
    stack.registry.blobs = blobs
    await stack.gateway.apply(delta())
    assert stack.gateway.missing() == []


async def test_tokenizer_with_other_bytes_than_its_digest_is_refused() -> None:
    stack = Stack()
    stack.registry.blobs = {sha256: blob + b" " for sha256, blob in stack.registry.blobs.items()}
    with pytest.raises(StagingFailed, match="do not match their digest"):
        await stack.gateway.apply(delta())
    assert stack.gateway.missing() == ["base", "tokenizer", "replica"]


async def test_tokenizer_is_fetched_once_for_many_deltas() -> None:
    stack = Stack()
    await stack.gateway.apply(delta())
    stack.registry.blobs = {}
    await stack.gateway.apply(delta(revision=2))
    assert stack.gateway.catalog.revision == 2


async def test_request_id_is_the_clients_when_sane() -> None:
    async with running() as stack:
        sane = await stack.http.get("/health", headers={"x-request-id": "abc-1.2"})
        assert sane.headers["x-request-id"] == "abc-1.2"
        for bad in ("a b", "x" * 129, "é", ""):
            response = await stack.http.get("/health", headers=[(b"x-request-id", bad.encode())])
            assert response.headers["x-request-id"] != bad
            assert len(response.headers["x-request-id"]) == 32
