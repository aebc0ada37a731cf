"""Queue and service by tenant, so that a noisy one stands out."""

from collections.abc import Mapping

from router.view import figures
from router.view.records import TenantView
from router.view.traffic import Latency
from router.view.window import Window


class _Tenants:
    """What the windows say of every tenant."""

    def __init__(self, short: Window, long: Window) -> None:
        self.waiting = short.values(figures.TENANT_WAITING)
        self.oldest_s = _highest(short)
        self.in_flight = short.values(figures.TENANT_IN_FLIGHT)
        self.service = short.values(figures.TENANT_SERVICE)
        self.service_per_s = short.rates(figures.TENANT_SERVICE)
        self.requests = short.values(figures.TENANT_REQUESTS)
        self.requests_per_s = short.rates(figures.TENANT_REQUESTS)
        self.limited = short.values(figures.LIMITED)
        self.limited_per_s = short.rates(figures.LIMITED)
        self._queue_wait = Latency.of(figures.TENANT_QUEUE_WAIT, long)
        self._first_token = Latency.of(figures.TENANT_FIRST_TOKEN, long)
        self._all_waiting = sum(self.waiting.values())
        self._all_service = sum(self.service_per_s.values())

    def names(self) -> set[str]:
        known = (self.waiting, self.in_flight, self.service, self.requests, self.limited)
        return {key[0] for values in known for key in values}

    def view(self, tenant: str) -> TenantView:
        key = (tenant,)
        queue_p50, queue_p99 = self._queue_wait.quantiles([key])
        first_p50, first_p99 = self._first_token.quantiles([key])
        waiting, service_per_s = self.waiting.get(key, 0.0), self.service_per_s.get(key, 0.0)
        return TenantView(
            tenant=tenant,
            waiting=int(waiting),
            queue_share=_share(waiting, self._all_waiting),
            oldest_wait_s=self.oldest_s.get(tenant, 0.0),
            queue_wait_p50_s=queue_p50,
            queue_wait_p99_s=queue_p99,
            in_flight=int(self.in_flight.get(key, 0)),
            service=self.service.get(key, 0.0),
            service_per_s=service_per_s,
            service_share=_share(service_per_s, self._all_service),
            requests=self.requests.get(key, 0.0),
            requests_per_s=self.requests_per_s.get(key, 0.0),
            limited=self.limited.get(key, 0.0),
            limited_per_s=self.limited_per_s.get(key, 0.0),
            first_token_p50_s=first_p50,
            first_token_p99_s=first_p99,
        )


def tenant_views(short: Window, long: Window) -> list[TenantView]:
    """Those who hold most of the queue first, then those who get most of the service."""
    tenants = _Tenants(short, long)
    views = [tenants.view(name) for name in tenants.names()]
    return sorted(views, key=lambda one: (-one.waiting, -one.service_per_s, -one.in_flight, -one.requests, one.tenant))


def _highest(window: Window) -> Mapping[str, float]:
    """The longest wait of each tenant at any replica."""
    found: dict[str, float] = {}
    for instance in window.last.readings:
        for (tenant,), waited_s in window.values(figures.TENANT_OLDEST, instance).items():
            found[tenant] = max(found.get(tenant, 0.0), waited_s)
    return found


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
