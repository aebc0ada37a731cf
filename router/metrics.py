"""The gateway's own metrics. Labels are names from the catalog and words of this code, never a client's text."""

import asyncio
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.errors import error_code

BASE_LABEL = "base"
"""The `model` label of the base model; no adapter may have this name."""

FAST_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SLOW_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DISCONNECT = "disconnect"
OK = "ok"


class ModelMetrics:
    """The series of one model. After `close` nothing brings them back."""

    def __init__(self, metrics: "GatewayMetrics", label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._outcomes: set[str] = set()
        self._closed = False
        self.prompt_tokens = metrics.prompt_tokens.labels(label)
        self.completion_tokens = metrics.completion_tokens.labels(label)
        self.first_token_s = metrics.first_token_s.labels(label)
        self.between_tokens_s = metrics.between_tokens_s.labels(label)
        self.latency_s = metrics.latency_s.labels(label)
        self.in_flight = metrics.in_flight.labels(label)

    def ended(self, outcome: str, latency_s: float) -> None:
        """Count a request's end."""
        self.in_flight.dec()
        if self._closed:
            return
        self._outcomes.add(outcome)
        self._metrics.requests.labels(self._label, outcome).inc()
        self.latency_s.observe(latency_s)

    def close(self) -> None:
        """Drop all series; requests still in flight count into nothing."""
        self._closed = True
        for metric in self._metrics.per_model:
            metric.remove(self._label)
        for outcome in self._outcomes:
            self._metrics.requests.remove(self._label, outcome)


class RequestMeter:
    """Times one call. Its `with` block is the call's life; the exception that leaves it names the outcome."""

    def __init__(self, model: ModelMetrics, num_prompt_tokens: int, clock: Callable[[], float]) -> None:
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._clock = clock
        self._started_s = clock()
        self._any_token = False

    def __enter__(self) -> "RequestMeter":
        self._model.in_flight.inc()
        self._model.prompt_tokens.inc(self._num_prompt_tokens)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._model.ended(_outcome(error), self._clock() - self._started_s)

    def prompt_meter(self) -> Callable[[int, int], None]:
        """A function to call for each message of one prompt with its tokens and the number of open choices."""
        last_s: float | None = None

        def arrived(num_tokens: int, num_open: int) -> None:
            nonlocal last_s
            if not num_tokens:
                return
            now_s = self._clock()
            self._model.completion_tokens.inc(num_tokens)
            if last_s is not None:
                self._model.between_tokens_s.observe((now_s - last_s) * num_open / num_tokens)
            elif not self._any_token:
                self._any_token = True
                self._model.first_token_s.observe(now_s - self._started_s)
            last_s = now_s

        return arrived


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return OK
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return DISCONNECT
    return error_code(error)


class GatewayMetrics:
    """Everything this gateway counts, in a registry of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, ModelMetrics] = {}
        self.registry = CollectorRegistry()
        model = ("model",)
        self.requests = Counter(
            "lorafleet_requests", "Calls by model and outcome.", ("model", "outcome"), registry=self.registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens by model.", model)
        self.completion_tokens = self._counter("completion_tokens", "Sampled tokens by model.", model)
        self.first_token_s = self._histogram("first_token_seconds", "Call to first token.", model, SLOW_BUCKETS)
        self.between_tokens_s = self._histogram("between_tokens_seconds", "Gap between tokens.", model, FAST_BUCKETS)
        self.latency_s = self._histogram("latency_seconds", "Call to last token.", model, SLOW_BUCKETS)
        self.in_flight = Gauge(
            "lorafleet_gateway_in_flight", "Calls being served by model.", model, registry=self.registry
        )
        self._errors = self._counter("errors", "Error answers by code.", ("code",))
        self._placements = self._counter("placements", "Requests placed at home, elsewhere or for the base.", ("kind",))
        self._limited = self._counter("limited", "Calls refused by a limit of their tenant.", ("limit",))
        self._propagation_s = self._histogram(
            "propagation_seconds", "Activation request to every replica staged.", (), SLOW_BUCKETS
        )

    @property
    def per_model(self) -> tuple[Counter | Gauge | Histogram, ...]:
        """The metrics whose only label is the model."""
        return (
            self.prompt_tokens,
            self.completion_tokens,
            self.first_token_s,
            self.between_tokens_s,
            self.latency_s,
            self.in_flight,
        )

    def meter(self, adapter_name: str | None, num_prompt_tokens: int) -> RequestMeter:
        """Begin to time a call to an adapter of the catalog (None: the base)."""
        label = BASE_LABEL if adapter_name is None else adapter_name
        model = self._models.get(label)
        if model is None:
            model = self._models[label] = ModelMetrics(self, label)
        return RequestMeter(model, num_prompt_tokens, self._clock)

    def keep_only(self, adapter_names: Iterable[str]) -> None:
        """Drop the series of adapters that are gone."""
        for label in self._models.keys() - {*adapter_names, BASE_LABEL}:
            self._models.pop(label).close()

    def answered_error(self, code: str) -> None:
        """Count an answer that was an error; `code` is one of this program's words."""
        self._errors.labels(code).inc()

    def placed(self, kind: str) -> None:
        """Count a placement by kind."""
        self._placements.labels(kind).inc()

    def limited(self, limit: str) -> None:
        """Count a call that a tenant's limit refused; `limit` is one of this program's words."""
        self._limited.labels(limit).inc()

    def propagated(self, seconds: float) -> None:
        """Observe how long an activation took to be staged everywhere."""
        self._propagation_s.observe(seconds)

    def exposition(self) -> bytes:
        """Prometheus text of this gateway alone."""
        return bytes(generate_latest(self.registry))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"lorafleet_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"lorafleet_gateway_{name}", text, labels, buckets=buckets, registry=self.registry)
