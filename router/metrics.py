"""The gateway's own metrics. Labels are names from the catalog and words of this code, never a client's text."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from registry.catalog import Resolution
from router.config import MetricsConfig
from router.meters import Key, ModelFamilies, ModelMetrics, RequestMeter, TenantFamilies, TenantMetrics
from telemetry import catalogue
from telemetry.cap import OTHER, Capped
from telemetry.exporter import Exporter, Reader

BASE_LABEL = "base"
"""The `model` label of the base model; no adapter may have this name."""

BASE: Key = (BASE_LABEL, "-")
SETTLED_AT_ONCE = 64
"""Live calls whose counts are brought into the series before streams get their turn again."""


class GatewayMetrics:
    """Everything this gateway counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, config: MetricsConfig | None = None) -> None:
        config = config or MetricsConfig()
        self._clock = clock
        self._exporter = Exporter(catalogue.GATEWAY)
        models, tenants = ModelFamilies(self._exporter), TenantFamilies(self._exporter)
        self._models: Capped[Key, ModelMetrics] = Capped(
            config.max_adapters, lambda key: ModelMetrics(models, key), (OTHER, "-")
        )
        self._tenants: Capped[str, TenantMetrics] = Capped(
            config.max_tenants, lambda tenant: TenantMetrics(tenants, tenant), OTHER
        )
        self._models.of(BASE)
        self._live: set[RequestMeter] = set()
        self._errors = self._exporter.counter(catalogue.ERRORS)
        self._placements = self._exporter.counter(catalogue.PLACEMENTS)

    def __repr__(self) -> str:
        return f"GatewayMetrics(models={self._models!r}, tenants={self._tenants!r})"

    def meter(self, resolution: Resolution, tenant: str, num_prompt_tokens: int) -> RequestMeter:
        """Begin to time a tenant's call to what the catalog resolved."""
        model, owner = self._models.of(_key(resolution)), self._tenants.of(tenant)
        return RequestMeter(model, owner, num_prompt_tokens, self._clock, self._live)

    def keep_only(self, versions: Collection[Key]) -> None:
        """Drop the series of versions that are no longer in service."""
        for key, model in self._models:
            if key != BASE and key not in versions:
                self._models.drop(key)
                model.close()

    def drop_tenants(self, tenants: Iterable[str]) -> None:
        """Drop the series of tenants that are gone."""
        for tenant in tenants:
            gone = self._tenants.drop(tenant)
            if gone is not None:
                gone.close()

    def answered_error(self, code: str) -> None:
        """Count an answer that was an error; `code` is one of this program's words."""
        self._errors.labels(code).inc()

    def placed(self, kind: str, held: str) -> None:
        """Count a placement by kind, and by where the replica held the version."""
        self._placements.labels(kind, held).inc()

    def limited(self, tenant: str, limit: str) -> None:
        """Count a call that a tenant's limit refused; `limit` is one of this program's words."""
        self._tenants.of(tenant).limited(limit)

    def watch(self, reader: Reader) -> None:
        """Ask `reader` for its values at every scrape."""
        self._exporter.watch(reader)

    async def settle(self) -> None:
        """Bring what live calls have counted into the series, so that a scrape shows it."""
        for number, meter in enumerate(tuple(self._live), 1):
            meter.settle()
            if number % SETTLED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def exposition(self) -> bytes:
        """Prometheus text of this gateway alone, as of the last `settle`. Any thread may call it."""
        return self._exporter.render()


def _key(resolution: Resolution) -> Key:
    return BASE if resolution.adapter is None else (resolution.adapter, str(resolution.number))
