"""What is told of each request that a replica ended: a line in the log, the spans of its trace, its part of the use.

Runs on the event loop, from reports that the step thread left behind.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from registry.usage_ledger import UsageLedger
from registry.usage_records import Consumer
from telemetry.catalogue import DIGEST_LABEL_LENGTH
from telemetry.logs import event
from telemetry.traces import Span, Traceparent, Tracer, Value, parse

if TYPE_CHECKING:
    from replica.accounts import Preemption, RequestReport
    from replica.messages import GenerateRequest

logger = logging.getLogger(__name__)
BASE = "base"
MS_PER_S = 1000.0
NS_PER_S = 1e9
FINE = ("stop", "length", "abort")
"""Outcomes that are nobody's fault."""


class ReplicaJournal:
    """One replica's. `wall_offset_s` is what to add to the engine's clock to get seconds of the epoch."""

    def __init__(
        self,
        replica_id: str,
        ledger: UsageLedger,
        tracer: Tracer,
        wall_offset_s: Callable[[], float] = lambda: time.time() - time.monotonic(),
    ) -> None:
        self._replica_id = replica_id
        self._ledger = ledger
        self._tracer = tracer
        self._wall_offset_s = wall_offset_s

    def __repr__(self) -> str:
        return f"ReplicaJournal({self._replica_id}, {self._ledger!r})"

    def ended(self, reports: "Sequence[RequestReport]") -> None:
        """Tell of these requests."""
        is_logged = logger.isEnabledFor(logging.INFO)
        for report in reports:
            request, origin = report.request, report.request.origin
            consumer = Consumer(request.tenant, origin.name, origin.number, request.adapter)
            if report.device_ns:
                self._ledger.add(consumer, device_ns=report.device_ns)
            if is_logged:
                event(logger, "request", self._line(report))
            parent = parse(origin.traceparent)
            if parent is not None:
                self._trace(report, parent)

    def preempted(self, preemptions: "Sequence[Preemption]") -> None:
        """Tell of choices that lost their KV blocks: `tokens` are computed again."""
        for each in preemptions:
            event(
                logger,
                "preempted",
                {
                    "request_id": each.request.origin.request_id,
                    "call_id": each.request.request_id,
                    **self._who(each.request),
                    "choice": each.index,
                    "tokens": each.num_tokens,
                },
            )

    def _who(self, request: "GenerateRequest") -> dict[str, str | int | None]:
        origin = request.origin
        return {
            "tenant": request.tenant,
            "adapter": origin.name or BASE,
            "version": origin.number,
            "digest": None if request.adapter is None else request.adapter[:DIGEST_LABEL_LENGTH],
            "replica": self._replica_id,
        }

    def _line(self, report: "RequestReport") -> dict[str, str | int | float | None]:
        first_s = report.first_token_s
        return {
            "request_id": report.request.origin.request_id,
            "call_id": report.request.request_id,
            **self._who(report.request),
            "outcome": report.outcome,
            "prompt_tokens": report.num_prompt,
            "output_tokens": report.num_output,
            "queue_ms": _ms(report.queue_s),
            "load_ms": _ms(report.load_s),
            "first_token_ms": None if first_s is None else _ms(first_s - report.arrived_s),
            "total_ms": _ms(report.ended_s - report.arrived_s),
            "preemptions": report.num_preemptions,
            "device_ms": report.device_ns / 1e6,
        }

    def _trace(self, report: "RequestReport", parent: Traceparent) -> None:
        offset_s = self._wall_offset_s()
        # What the request's span says too is not repeated: each attribute costs 3 us to send.
        who: dict[str, Value] = {
            f"lorafleet.{name}": value
            for name, value in self._who(report.request).items()
            if value and name != "replica"
        }
        parts = list(phases(report))
        for name, start_s, end_s, tokens in parts:
            is_last = name == parts[-1][0]
            attributes = {**who, "lorafleet.tokens": tokens}
            if is_last:
                attributes["lorafleet.outcome"] = report.outcome
            error = report.outcome if is_last and report.outcome not in FINE else None
            start_ns, end_ns = (int((at_s + offset_s) * NS_PER_S) for at_s in (start_s, end_s))
            self._tracer.part(parent, Span(name, start_ns, end_ns, attributes, error))


def phases(report: "RequestReport") -> Iterator[tuple[str, float, float, int]]:
    """Name, start, end (by the engine's clock) and tokens of what a request went through, as far as it came.

    A load that took no time is left out; between `load` and `prefill` a request waits for KV blocks.
    """
    ended_s = report.ended_s
    admitted_s = ended_s if report.admitted_s is None else report.admitted_s
    yield "queue", report.arrived_s, admitted_s, 0
    if report.load_s:
        yield "load", admitted_s, admitted_s + report.load_s, 0
    if report.started_s is not None:
        first_s = ended_s if report.first_token_s is None else report.first_token_s
        yield "prefill", report.started_s, first_s, report.num_prompt
        if report.first_token_s is not None:
            yield "decode", first_s, ended_s, report.num_output


def _ms(seconds: float) -> float:
    return seconds * MS_PER_S
