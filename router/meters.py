"""The series of one model and of one tenant, and the meter of one call. Knows nothing of how they are exported."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from router.errors import error_code
from router.pace import Pace
from telemetry import catalogue
from telemetry.exporter import Exporter
from telemetry.owned import Owned

DISCONNECT = "disconnect"
OK = "ok"

Key = tuple[str, str]
"""Adapter and version, as labels say them."""


class ModelFamilies:
    """The families by model and version."""

    def __init__(self, exporter: Exporter) -> None:
        self.requests = exporter.counter(catalogue.REQUESTS)
        self.in_flight = exporter.gauge(catalogue.IN_FLIGHT)
        self.prompt_tokens = exporter.counter(catalogue.PROMPT_TOKENS)
        self.completion_tokens = exporter.counter(catalogue.COMPLETION_TOKENS)
        self.first_token_s = exporter.histogram(catalogue.FIRST_TOKEN_S)
        self.between_tokens_s = exporter.histogram(catalogue.BETWEEN_TOKENS_S)
        self.latency_s = exporter.histogram(catalogue.LATENCY_S)


class ModelMetrics:
    """The series of one version. Those that are in flight when it is closed count into nothing."""

    def __init__(self, families: ModelFamilies, key: Key) -> None:
        self._families = families
        self._key = key
        self._owned = Owned()
        self.in_flight = self._owned.of(families.in_flight, *key)
        self.prompt_tokens = self._owned.of(families.prompt_tokens, *key)
        self.completion_tokens = self._owned.of(families.completion_tokens, *key)
        self.first_token_s = self._owned.of(families.first_token_s, *key)
        self.between_tokens_s = self._owned.of(families.between_tokens_s, *key)
        self.latency_s = self._owned.of(families.latency_s, *key)

    def ended(self, outcome: str, latency_s: float) -> None:
        """Count a call's end."""
        self.in_flight.dec()
        self.latency_s.observe(latency_s)
        self._owned.of(self._families.requests, *self._key, outcome).inc()

    def close(self) -> None:
        """Drop all series."""
        self._owned.close()


class TenantFamilies:
    """The families by tenant."""

    def __init__(self, exporter: Exporter) -> None:
        self.requests = exporter.counter(catalogue.TENANT_REQUESTS)
        self.in_flight = exporter.gauge(catalogue.TENANT_IN_FLIGHT)
        self.tokens = exporter.counter(catalogue.TENANT_TOKENS)
        self.first_token_s = exporter.histogram(catalogue.TENANT_FIRST_TOKEN_S)
        self.limited = exporter.counter(catalogue.LIMITED)


class TenantMetrics:
    """The series of one tenant."""

    def __init__(self, families: TenantFamilies, tenant: str) -> None:
        self._families = families
        self._tenant = tenant
        self._owned = Owned()
        self.in_flight = self._owned.of(families.in_flight, tenant)
        self.prompt_tokens = self._owned.of(families.tokens, tenant, "prompt")
        self.completion_tokens = self._owned.of(families.tokens, tenant, "completion")
        self.first_token_s = self._owned.of(families.first_token_s, tenant)

    def ended(self, outcome: str) -> None:
        """Count a call's end."""
        self.in_flight.dec()
        self._owned.of(self._families.requests, self._tenant, outcome).inc()

    def limited(self, limit: str) -> None:
        """Count a call that a limit refused."""
        self._owned.of(self._families.limited, self._tenant, limit).inc()

    def close(self) -> None:
        """Drop all series."""
        self._owned.close()


class RequestMeter:
    """Times one call. Its `with` block is the call's life; the exception that leaves it names the outcome.

    Tokens and gaps gather in the paces of its prompts until `settle`, which whoever is scraped calls for those in
    `live`, and the end of the call by itself. Belongs to the event loop, as they do.
    """

    def __init__(
        self,
        model: ModelMetrics,
        tenant: TenantMetrics,
        num_prompt_tokens: int,
        clock: Callable[[], float],
        live: "set[RequestMeter]",
    ) -> None:
        self._model = model
        self._tenant = tenant
        self._num_prompt_tokens = num_prompt_tokens
        self._clock = clock
        self._live = live
        self._started_s = clock()
        self._paces: list[Pace] = []
        self._num_settled = 0

    def __enter__(self) -> "RequestMeter":
        self._live.add(self)
        self._model.in_flight.inc()
        self._tenant.in_flight.inc()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.discard(self)
        self.settle()
        outcome = outcome_of(error)
        self._model.ended(outcome, self._clock() - self._started_s)
        self._tenant.ended(outcome)

    def admitted(self) -> None:
        """No limit refuses the call: its prompt counts."""
        for owner in (self._model, self._tenant):
            owner.prompt_tokens.inc(self._num_prompt_tokens)

    def pace(self) -> Pace:
        """What is told of each message of one prompt."""
        self._paces.append(Pace(self._clock, self.settle))
        return self._paces[-1]

    def settle(self) -> None:
        """Bring into the series what has come since the last time."""
        num_tokens = sum([pace.num_tokens for pace in self._paces])
        num_new = num_tokens - self._num_settled
        if not num_new:
            return
        if not self._num_settled:
            self._observe_first(min([pace.first_s for pace in self._paces if pace.first_s is not None]))
        self._num_settled = num_tokens
        self._model.completion_tokens.inc(num_new)
        self._tenant.completion_tokens.inc(num_new)
        for pace in self._paces:
            self._model.between_tokens_s.observe_all(pace.take_gaps_s())

    def _observe_first(self, at_s: float) -> None:
        self._model.first_token_s.observe(at_s - self._started_s)
        self._tenant.first_token_s.observe(at_s - self._started_s)


def outcome_of(error: BaseException | None) -> str:
    """What a call that `error` ended came to, as metrics and logs say it."""
    if error is None:
        return OK
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return DISCONNECT
    return error_code(error)
