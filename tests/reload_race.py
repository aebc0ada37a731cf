"""Requests by alias while the alias moves: every answer must be of a version that the alias could stand for meanwhile.

The content that an answer claims (its fingerprint) must be the one that PEFT's text tells, and one that was live at
some moment of the request: not before its upload was sent, not after the whole fleet had taken the next one.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer

from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import local_fleet
from tests.tiny_models import load_peft, make_adapter

NAME, PROMPT, NUM_TOKENS = "race", "Hello", 4
NUM_CONTENTS, NUM_SLOTS, NUM_CLIENTS = 6, 2, 8
TARGETS = (("q_proj", "v_proj"), ("k_proj", "o_proj", "up_proj"), ("gate_proj", "down_proj"))


@dataclass(frozen=True)
class Content:
    """An adapter as it is uploaded, and PEFT's text with it."""

    files: tuple[tuple[str, bytes], ...]
    text: str


@dataclass
class Span:
    """When a digest may have been live."""

    digest: str
    from_s: float
    until_s: float = math.inf


class AliasHistory:
    """What the alias may have stood for, moment by moment, as far as its only mover can know."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: list[Span] = []

    def asked(self, sent_s: float, digest: str) -> None:
        """From the moment the upload was sent the alias may stand for it."""
        self._spans.append(Span(digest, sent_s))

    def settled(self) -> None:
        """The whole fleet has the last one, so every older one has ended."""
        now_s = self._clock()
        for span in self._spans[:-1]:
            span.until_s = min(span.until_s, now_s)

    def allowed(self, begun_s: float, ended_s: float) -> set[str]:
        return {span.digest for span in self._spans if span.from_s <= ended_s and span.until_s >= begun_s}


def make_contents(base: Path, folder: Path, number: int) -> list[Content]:
    """Adapters whose texts all differ, so that a text tells its adapter."""
    found: dict[str, Content] = {}
    for seed in range(10 * number):
        made = make_adapter(base, TARGETS[seed % 3], (4, 8, 16)[seed % 3], folder=folder / f"race-{seed}", seed=seed)
        text = greedy_text(base, made)
        files = tuple((path.name, path.read_bytes()) for path in sorted(made.iterdir()))
        found.setdefault(text, Content(files, text))
        if len(found) == number:
            return list(found.values())
    raise AssertionError(f"only {len(found)} of {number} texts differ")


def greedy_text(base: Path, folder: Path) -> str:
    """PEFT's own greedy continuation."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = load_peft(base, folder).generate(input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False)  # type: ignore[operator]
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


class Race:
    """One mover, many clients, and what they saw; `wrong` must stay empty."""

    def __init__(self, client: httpx.AsyncClient, contents: Sequence[Content], seed: int = 0) -> None:
        self._client, self._contents = client, contents
        self._random = random.Random(seed)
        self._history = AliasHistory()
        self._texts: dict[str, str] = {}
        """Fingerprint -> text."""
        self._answers: list[tuple[float, float, dict[str, Any]]] = []
        self._last: Content | None = None
        self.num_moves = 0

    async def run(self, num_requests: int, num_clients: int) -> dict[str, Any]:
        """Ask that often while versions come and go; the figures of the run. Raises AssertionError for a bad answer."""
        await self._move()
        clients = [asyncio.create_task(self._ask_often(num_requests // num_clients)) for _ in range(num_clients)]
        while not all(client.done() for client in clients):
            await self._move()
            await self._calm(self._random.randrange(3 * num_clients), clients)
        await asyncio.gather(*clients)
        return self._judge()

    async def _calm(self, num_answers: int, clients: Sequence["asyncio.Task[None]"]) -> None:
        """Leave the alias where it is until so many more answers have come."""
        enough = len(self._answers) + num_answers
        while len(self._answers) < enough and not all(client.done() for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def _move(self) -> None:
        """Upload a content, new or known, and see it live everywhere."""
        others = [content for content in self._contents if content is not self._last]
        content, sent_s = self._random.choice(others), time.monotonic()
        self._last = content
        files = [("files", (name, data, "application/octet-stream")) for name, data in content.files]
        response = await self._client.post(f"/v1/adapters/{NAME}/versions", files=files)
        result = response.json()
        assert response.status_code in (200, 201), response.text
        assert result["activation"]["state"] == "done", response.text
        digest = result["version"]["digest"]
        self._history.asked(sent_s, f"fp_{digest[:16]}")
        self._history.settled()
        self._texts[f"fp_{digest[:16]}"] = content.text
        self.num_moves += 1

    async def _ask_often(self, times: int) -> None:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        for _ in range(times):
            begun_s = time.monotonic()
            response = await self._client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            self._answers.append((begun_s, time.monotonic(), response.json()))

    def _judge(self) -> dict[str, Any]:
        counts, seen = Counter[str](), Counter[str]()
        for begun_s, ended_s, answer in self._answers:
            claimed, text = answer["system_fingerprint"], answer["choices"][0]["text"]
            allowed = self._history.allowed(begun_s, ended_s)
            counts["another_text"] += text != self._texts.get(claimed)
            counts["another_version"] += claimed not in allowed
            counts["while_moving"] += len(allowed) > 1
            counts["possible"] += len(allowed)
            seen[claimed] += 1
        return {
            "requests": len(self._answers),
            "moves": self.num_moves,
            "versions_seen": len(seen),
            "while_the_alias_moved": counts["while_moving"],
            "mean_versions_possible": round(counts["possible"] / len(self._answers), 2),
            "text_of_another_version_than_claimed": counts["another_text"],
            "version_that_the_alias_did_not_stand_for": counts["another_version"],
        }


async def in_one_process(base: Path, folder: Path, num_requests: int) -> dict[str, Any]:
    """A race on two replicas whose slots are fewer than the versions."""
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=folder / "node", max_slots=NUM_SLOTS, arena_bytes=8 << 20),
        scheduler=SchedulerConfig(num_kv_blocks=512),
    )
    contents = make_contents(base, folder, NUM_CONTENTS)
    async with local_fleet(folder, config, num_replicas=2) as fleet, fleet.client() as client:
        figures = await Race(client, contents).run(num_requests, NUM_CLIENTS)
        fleet.check_integrity()
    return figures


async def over_http(url: str, base: Path, folder: Path, num_requests: int) -> dict[str, Any]:
    """A race on a fleet that runs."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await Race(client, make_contents(base, folder, NUM_CONTENTS)).run(num_requests, NUM_CLIENTS)


def check(figures: dict[str, Any]) -> None:
    """The alias did move under the requests, and nothing was wrong."""
    assert figures["versions_seen"] >= 3
    assert 0 < figures["while_the_alias_moved"] < figures["requests"]
    assert figures["text_of_another_version_than_claimed"] == 0
    assert figures["version_that_the_alias_did_not_stand_for"] == 0
