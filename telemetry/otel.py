"""Spans to an OpenTelemetry collector. The only module that imports `opentelemetry`; needs the extra `otel`.

Spans are made when they are over, from their times: nothing is kept open, and nothing runs while tokens flow. The
exporter works on a thread of its own with a bounded queue, and drops spans when the collector is away.
"""

import random

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from telemetry.traces import Span, TraceConfig, Traceparent

SCOPE = InstrumentationScope("lorafleet")
FLAGS = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status(StatusCode.UNSET)


class OtelTracer:
    """`telemetry.traces.Tracer` over a span processor. Safe from any thread."""

    def __init__(self, processor: SpanProcessor, *, role: str, member: str, sample_ratio: float = 1.0) -> None:
        self._processor = processor
        self._resource = Resource.create({"service.name": f"lorafleet-{role}", "service.instance.id": member})
        self._sample_ratio = sample_ratio
        self._random = random.Random()

    def begin(self, client: Traceparent | None) -> Traceparent | None:
        if client is not None:
            return client._replace(span_id=self._new_id(64)) if client.is_sampled else None
        if self._random.random() >= self._sample_ratio:
            return None
        return Traceparent(self._new_id(128), self._new_id(64))

    def request(self, own: Traceparent, client: Traceparent | None, span: Span) -> None:
        parent = None if client is None else _context(client, is_remote=True)
        self._end(span, _context(own), parent, SpanKind.SERVER)

    def part(self, parent: Traceparent, span: Span) -> None:
        own = parent._replace(span_id=self._new_id(64))
        self._end(span, _context(own), _context(parent, is_remote=True), SpanKind.INTERNAL)

    def close(self) -> None:
        self._processor.shutdown()

    def _end(self, span: Span, context: SpanContext, parent: SpanContext | None, kind: SpanKind) -> None:
        over = ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=kind,
            status=UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=SCOPE,
        )
        self._processor.on_end(over)

    def _new_id(self, num_bits: int) -> int:
        return self._random.getrandbits(num_bits) or 1


def _context(place: Traceparent, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(place.trace_id, place.span_id, is_remote, FLAGS)


def open_tracer(config: TraceConfig, *, role: str, member: str) -> OtelTracer:
    """A tracer that exports over OTLP/HTTP."""
    exporter = OTLPSpanExporter(endpoint=config.endpoint)
    return OtelTracer(BatchSpanProcessor(exporter), role=role, member=member, sample_ratio=config.sample_ratio)
