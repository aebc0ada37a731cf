"""Spans in plain values, and who takes them. Imports no tracing library: `telemetry.otel` has the one there is.

A trace crosses processes as W3C's `traceparent` (https://www.w3.org/TR/trace-context/).
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SAMPLED = 1
EXTRA = "otel"

Value = str | int | float


class TraceConfig(BaseModel):
    """Whether requests are traced, and where the spans go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    endpoint: str | None = None
    """An OTLP/HTTP endpoint; omitted: what OpenTelemetry's own environment variables say, else a collector here."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """The part of the requests that are traced when their client has not decided it."""


class TracesUnavailable(ValueError):
    """Traces are asked for and what they need is not installed."""


class Traceparent(NamedTuple):
    """A place in a trace: 128 and 64 bits, not 0."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse(header: str | None) -> Traceparent | None:
    """The place that a header names; None for one that is missing or broken, as the recommendation wants it."""
    found = None if header is None else TRACEPARENT.fullmatch(header)
    if found is None:
        return None
    place = Traceparent(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & SAMPLED))
    return place if place.trace_id and place.span_id else None


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. Nanoseconds since the epoch; `error` says why it failed, None when it did not."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None


class Tracer(Protocol):
    """Takes spans when they are over. No method blocks or raises."""

    def begin(self, client: Traceparent | None) -> Traceparent | None:
        """The place of a request's own span, below the client's; None when it is not sampled."""
        ...

    def request(self, own: Traceparent, client: Traceparent | None, span: Span) -> None:
        """The request's span, at the place that `begin` gave."""
        ...

    def part(self, parent: Traceparent, span: Span) -> None:
        """A part of a request."""
        ...

    def close(self) -> None:
        """Hand over what is left."""
        ...


class NoTraces:
    """Tracing is off."""

    def begin(self, client: Traceparent | None) -> Traceparent | None:
        return None

    def request(self, own: Traceparent, client: Traceparent | None, span: Span) -> None:
        """Nothing to do."""

    def part(self, parent: Traceparent, span: Span) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def open_tracer(config: TraceConfig, *, role: str, member: str) -> Tracer:
    """The tracer that the configuration asks for. Raises TracesUnavailable."""
    if not config.enabled:
        return NoTraces()
    check_available(config)
    return cast(Tracer, importlib.import_module("telemetry.otel").open_tracer(config, role=role, member=member))


def check_available(config: TraceConfig) -> None:
    """Raises TracesUnavailable when `config` wants traces and the extra is not installed."""
    if not config.enabled:
        return
    try:
        importlib.import_module("telemetry.otel")
    except ModuleNotFoundError as error:
        raise TracesUnavailable(
            f"traces.enabled needs OpenTelemetry ({error.name} is not installed): pip install 'lorafleet[{EXTRA}]'"
        ) from error
