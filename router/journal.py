"""What is told of each call: a line in the log, the span of its trace, an entry in the ledger of use.

Everything is made when the call is over. Never a key, a prompt or an answer: only names of the catalog, words of this
program, numbers, and the request id, whose characters the middleware has checked.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from registry.usage_ledger import UsageLedger
from registry.usage_records import Consumer
from replica.messages import Origin
from router.calls import Call
from router.errors import error_code, http_face
from router.meters import DISCONNECT, OK, outcome_of
from telemetry.catalogue import DIGEST_LABEL_LENGTH
from telemetry.logs import event
from telemetry.traces import NoTraces, Span, Traceparent, Tracer, parse

logger = logging.getLogger(__name__)
BASE = "base"
MS_PER_S = 1000.0
NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came in: its id, the trace that its client is in, and when, by the journal's clock."""

    request_id: str
    client: Traceparent | None
    at_s: float


class Run(Protocol):
    """One prompt of a call, as far as the journal looks at it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def replica_id(self) -> str | None: ...
    @property
    def first_token_s(self) -> float | None: ...
    @property
    def was_answered(self) -> bool: ...


class Journal:
    """One gateway's. `ledger` is handed to the registry by whoever runs the gateway."""

    def __init__(
        self,
        ledger: UsageLedger,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = ledger
        self._tracer = tracer or NoTraces()
        self._clock = clock
        self._wall_clock = wall_clock

    def __repr__(self) -> str:
        return f"Journal({self.ledger!r})"

    def arrival(self, request_id: str, traceparent: str | None = None) -> Arrival:
        """Note that a request has come in; `traceparent` is the header as the client sent it."""
        return Arrival(request_id, parse(traceparent), self._clock())

    def entry(self, call: Call, arrival: Arrival) -> "Entry":
        """The call's entry, which is written when its `with` block ends."""
        return Entry(self, call, arrival, self._tracer.begin(arrival.client))

    def refused(self, request_id: str, tenant: str | None, route: str, error: Exception) -> None:
        """Tell of a request that was answered with an error before it became a call."""
        status = http_face(error).status
        fields = {"request_id": request_id, "tenant": tenant, "route": route, "code": error_code(error)}
        logger.log(
            logging.WARNING if status >= 500 else logging.INFO,
            "refused",
            extra={"fields": {**fields, "status": status}},
        )

    def write(self, entry: "Entry", outcome: str) -> None:
        """The call is over."""
        now_s, wall_s = self._clock(), self._wall_clock()
        self._account(entry)
        if entry.own is None and not logger.isEnabledFor(logging.INFO):
            return
        fields = entry.fields(outcome, now_s)
        event(logger, "request", fields)
        if entry.own is not None:
            self._trace(entry, entry.own, outcome, fields, (wall_s - (now_s - entry.arrival.at_s), wall_s))

    def _account(self, entry: "Entry") -> None:
        """A call counts once a replica has answered; what it was told it used is what it is charged for."""
        if any(run.was_answered for run in entry.runs):
            call, found = entry.call, entry.call.resolution
            consumer = Consumer(call.tenant, found.adapter, found.number, found.digest)
            self.ledger.add(consumer, requests=1, prompt_tokens=call.num_prompt_tokens, output_tokens=entry.num_output)

    def _trace(
        self,
        entry: "Entry",
        own: Traceparent,
        outcome: str,
        fields: dict[str, str | int | float | None],
        span_s: tuple[float, float],
    ) -> None:
        """`span_s` is when the call came and when it ended, in seconds of the epoch."""
        start_s, end_s = span_s
        attributes = {f"lorafleet.{name}": value for name, value in fields.items() if value is not None}
        error = None if outcome in (OK, DISCONNECT) else outcome
        span = Span("request", int(start_s * NS_PER_S), int(end_s * NS_PER_S), attributes, error)
        self._tracer.request(own, entry.arrival.client, span)


class Entry:
    """One call's life. Its `with` block is the call's; the exception that leaves it names the outcome."""

    def __init__(self, journal: Journal, call: Call, arrival: Arrival, own: Traceparent | None) -> None:
        self._journal = journal
        self.call = call
        self.arrival = arrival
        self.own = own
        self.runs: Sequence[Run] = ()

    def __enter__(self) -> "Entry":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._journal.write(self, outcome_of(error))

    @property
    def origin(self) -> Origin:
        """What replicas are told."""
        found, own = self.call.resolution, self.own
        return Origin(self.arrival.request_id, found.adapter, found.number, None if own is None else str(own))

    @property
    def num_output(self) -> int:
        return sum(run.num_tokens for run in self.runs)

    def fields(self, outcome: str, now_s: float) -> dict[str, str | int | float | None]:
        """The line in the log. `replica` names several where prompts went to several."""
        call, found, start_s = self.call, self.call.resolution, self.arrival.at_s
        came = [run.first_token_s for run in self.runs if run.first_token_s is not None]
        replicas = {run.replica_id: None for run in self.runs if run.replica_id}
        return {
            "request_id": self.arrival.request_id,
            "call_id": call.call_id,
            "tenant": call.tenant,
            "adapter": found.adapter or BASE,
            "version": found.number,
            "digest": None if found.digest is None else found.digest[:DIGEST_LABEL_LENGTH],
            "replica": ",".join(sorted(replicas)) or None,
            "outcome": outcome,
            "prompt_tokens": call.num_prompt_tokens,
            "output_tokens": self.num_output,
            "first_token_ms": (min(came) - start_s) * MS_PER_S if came else None,
            "total_ms": (now_s - start_s) * MS_PER_S,
        }
