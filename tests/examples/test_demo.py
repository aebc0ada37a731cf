"""The tour against a stand-in server behind the real `openai` client."""

import json
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from examples import corpus, demo

CHUNK_CHARS = 3
"""The stand-in's tokens are pieces of this many characters."""


class FakeServer:
    """Knows the tenants' models and the base. A model likes the text of its own tenant, unless told otherwise."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.disliked: set[str] = set()
        self.owners = {
            corpus.to_sample(record).text: tenant
            for tenant in corpus.tenants()
            for record in corpus.read_records(tenant, "heldout")
        }

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": self.models()})
        body = json.loads(request.content)
        self.bodies.append(body)
        if request.url.path == "/v1/completions":
            return httpx.Response(200, json=self.completion(body))
        return self.chat(body)

    def models(self) -> list[dict[str, Any]]:
        adapters = [{"id": name, "object": "model", "parent": "smol"} for name in corpus.tenants()]
        return [*adapters, {"id": "smol", "object": "model", "parent": None}]

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        *offsets, last = range(0, len(body["prompt"].removesuffix(corpus.END_OF_TURN)), CHUNK_CHARS)
        offsets += [last, len(body["prompt"]) - len(corpus.END_OF_TURN)]
        likes = self.owners[body["prompt"]] == body["model"] and body["model"] not in self.disliked
        logprobs = [None, *[-0.5 if likes else -2.0] * (len(offsets) - 1)]
        shown = {
            "token_logprobs": logprobs,
            "text_offset": offsets,
            "tokens": ["x"] * len(offsets),
            "top_logprobs": None,
        }
        choice = {"index": 0, "text": body["prompt"], "finish_reason": "length", "logprobs": shown}
        return {"id": "c", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice]}

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        common = {"id": "c", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "Ahoy"}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return httpx.Response(200, json={**common, "object": "chat.completion", "choices": choices})
        events = [{**common, "object": "chat.completion.chunk", "choices": choices} for choices in self.deltas()]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    def deltas(self) -> Iterator[list[dict[str, Any]]]:
        yield [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        for piece in ("A", "rr"):
            yield [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]
        yield [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        yield []


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    http = httpx.Client(transport=httpx.MockTransport(server))
    with openai.OpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0) as client:
        yield client


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Notes every call of the command line tool, which succeeds."""
    calls: list[dict[str, Any]] = []

    def run(command: tuple[str, ...], env: dict[str, str], check: bool) -> Any:
        calls.append({"command": command[1:], "url": env["LORAFLEET_URL"]})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return calls


def test_streamed_pieces_add_up_to_the_answer(client: openai.OpenAI) -> None:
    assert list(demo.stream_answer(client, "pirate", [{"role": "user", "content": "Hi"}])) == ["A", "rr"]


def test_scoring_asks_for_an_echo_and_generates_nothing(server: FakeServer, client: openai.OpenAI) -> None:
    sample = corpus.to_sample(corpus.read_records("sql", "heldout")[0])
    values = demo.echo_logprobs(client, "sql", sample)
    (body,) = server.bodies
    assert (body["max_tokens"], body["echo"], body["logprobs"], body["prompt"]) == (0, True, 0, sample.text)
    assert set(values) == {-0.5}
    assert abs(len(values) - 1 - sample.num_answer_chars / CHUNK_CHARS) <= 1


def test_measure_fills_every_cell_of_the_table(client: openai.OpenAI) -> None:
    models = {**{name: name for name in corpus.tenants()}, "base": "smol"}
    matrix = demo.measure(client, models, num_heldout=2)
    assert list(matrix) == corpus.tenants()
    for tenant, row in matrix.items():
        assert list(row) == list(models)
        assert row[tenant] < 2 < min(value for column, value in row.items() if column != tenant)


def test_base_is_the_model_without_a_parent(client: openai.OpenAI) -> None:
    assert demo.base_name(list(client.models.list())) == "smol"


def test_base_must_be_listed() -> None:
    with pytest.raises(demo.DemoError, match="--base-model"):
        demo.base_name([SimpleNamespace(id="pirate", parent="smol")])


@pytest.mark.parametrize(("disliked", "status"), [((), 0), (("legal",), 1)], ids=["all win", "one loses"])
def test_tour_ends_with_1_when_an_adapter_loses(
    server: FakeServer,
    client: openai.OpenAI,
    pushes: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    disliked: tuple[str, ...],
    status: int,
) -> None:
    server.disliked.update(disliked)
    monkeypatch.setattr(demo, "OpenAI", lambda **_: client)
    assert demo.tour("http://test", "k", None, num_heldout=1) == status
    assert [call["command"][-2] for call in pushes] == corpus.tenants()
    chats = [body for body in server.bodies if "messages" in body]
    streamed = [body["model"] for body in chats if body.get("stream")]
    whole = [body["model"] for body in chats if not body.get("stream") and body["model"] != "smol"]
    assert streamed == whole == corpus.tenants()


def test_push_calls_the_tool_with_the_servers_address(pushes: list[dict[str, Any]]) -> None:
    demo.push("http://test", "sql")
    folder = str(corpus.ADAPTERS / "sql")
    assert pushes == [{"command": ("-m", "cluster.cli", "push", "sql", folder), "url": "http://test"}]


def test_main_ends_with_2_when_a_push_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 3))
    assert demo.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "pushing commit ended with status 3" in capsys.readouterr().out


def test_main_ends_with_2_when_no_server_answers(
    pushes: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "DEFAULT_MAX_RETRIES", 0)
    assert demo.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "demo: Connection error" in capsys.readouterr().out
