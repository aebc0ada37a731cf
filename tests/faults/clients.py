"""Clients of a fleet that is in trouble: each request is checked to its end, and what it came to is kept.

A text that is not what PEFT says for that adapter, or an end that nobody may see, ends the client with an error.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from tests.faults.churn import Worker

PATIENCE_S = 120.0
PAUSE_S = 0.05


class End(StrEnum):
    """What a request came to."""

    RIGHT = "right"
    CUT = "cut"
    """A stream that had begun and ended with an error event."""
    REFUSED = "refused"
    """Nobody took the connection."""
    BROKEN = "broken"
    """The connection broke before the answer was complete."""
    FAILED = "failed"
    """An error answer, with nothing of it streamed before."""


@dataclass(frozen=True)
class Outcome:
    """One request. Times are of `time.monotonic`; `first_s` is when the first of the answer came."""

    model: str
    is_stream: bool
    end: End
    began_s: float
    first_s: float
    ended_s: float
    detail: str = ""

    @property
    def waited_s(self) -> float:
        """How long the client waited for the first of its answer."""
        return self.first_s - self.began_s


@dataclass(frozen=True)
class Expected:
    """A model, and what it says to PROMPT in `num_tokens` tokens."""

    model: str
    text: str
    num_tokens: int


PROMPT = "Hello"


class Client(Worker):
    """Asks for one model after the other, every second time as a stream, each on a connection of its own."""

    def __init__(self, url: str, expected: Sequence[Expected], seed: int) -> None:
        super().__init__(seed)
        self.outcomes: list[Outcome] = []
        self._url = url
        self._expected = expected
        self._http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))

    def turn(self) -> None:
        expected, is_stream = self.random.choice(self._expected), self.num_turns % 2 == 0
        began_s = time.monotonic()
        try:
            outcome = self._ask(expected, is_stream, began_s)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            outcome = Outcome(expected.model, is_stream, End.REFUSED, began_s, *_now(), repr(error))
        except httpx.TransportError as error:
            if isinstance(error, httpx.TimeoutException):
                raise AssertionError(f"{expected.model}: no answer within {PATIENCE_S:g} s") from error
            outcome = Outcome(expected.model, is_stream, End.BROKEN, began_s, *_now(), repr(error))
        self.outcomes.append(outcome)
        if outcome.end is not End.RIGHT:
            time.sleep(PAUSE_S)

    def _ask(self, expected: Expected, is_stream: bool, began_s: float) -> Outcome:
        body = {
            "model": expected.model,
            "prompt": PROMPT,
            "max_tokens": expected.num_tokens,
            "temperature": 0,
            "stream": is_stream,
        }
        with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                detail = f"{response.status_code}: {response.read().decode(errors='replace')[:300]}"
                return Outcome(expected.model, is_stream, End.FAILED, began_s, *_now(), detail)
            if not is_stream:
                text = json.loads(response.read())["choices"][0]["text"]
                assert text == expected.text, f"{expected.model} said {text!r}, not {expected.text!r}"
                return Outcome(expected.model, is_stream, End.RIGHT, began_s, *_now())
            return self._read(response, expected, began_s)

    def _read(self, response: httpx.Response, expected: Expected, began_s: float) -> Outcome:
        """A stream to its end: all of the text, or the beginning of it and one error event."""
        text, first_s, error, finish = "", 0.0, None, None
        for event in events(response):
            first_s = first_s or time.monotonic()
            if "error" in event:
                error = event["error"]
                continue
            assert error is None, "text after an error"
            choice = event["choices"][0]
            text, finish = text + choice["text"], choice["finish_reason"] or finish
        if error is not None:
            assert expected.text.startswith(text), f"{expected.model} began {text!r}, not {expected.text!r}"
            detail = f"{error['code']}: {error['message']}"
            return Outcome(expected.model, True, End.CUT, began_s, first_s, time.monotonic(), detail)
        assert text == expected.text, f"{expected.model} said {text!r}, not {expected.text!r}"
        assert finish in ("stop", "length"), finish
        return Outcome(expected.model, True, End.RIGHT, began_s, first_s, time.monotonic())


def _now() -> tuple[float, float]:
    now_s = time.monotonic()
    return now_s, now_s


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events. Raises RemoteProtocolError when it ends without its last one."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


def check(outcomes: Sequence[Outcome], lost: Collection[str], proxy_died_s: tuple[float, float] | None = None) -> None:
    """Assert that every request had its whole answer, but for those that nobody could have saved.

    Those are streams that had begun on one of the `lost` replicas, and requests whose connection was open on the proxy
    while it died: from one time to another, when its manager was killed.
    """
    killed_s, gone_s = proxy_died_s or (math.inf, -math.inf)
    for outcome in outcomes:
        if outcome.end is End.CUT:
            assert outcome.detail.startswith("replica_gone"), outcome
            assert any(replica in outcome.detail for replica in lost), f"{outcome}; lost were {sorted(lost)}"
        elif outcome.end is End.BROKEN:
            assert outcome.began_s <= gone_s, (outcome, proxy_died_s)
            assert killed_s <= outcome.ended_s, (outcome, proxy_died_s)
        else:
            assert outcome.end is End.RIGHT, outcome


def tally(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """How many came to each end."""
    counts = Counter(str(outcome.end) for outcome in outcomes)
    return {str(end): counts[str(end)] for end in End if counts[str(end)] or end is End.RIGHT}
