"""The series of tenants at a replica, and what its requests have had of it. Knows requests, no steps and no adapters.

Tokens are counted from the requests themselves, some time after they were sampled: nothing is done for each of them.
"""

import math
from collections.abc import Callable, Iterator

from replica.sequence import RequestGroup
from telemetry import catalogue
from telemetry.cap import OTHER, Capped
from telemetry.exporter import Exporter
from telemetry.owned import Owned


class TenantFamilies:
    """The families by tenant."""

    def __init__(self, exporter: Exporter) -> None:
        self.service = exporter.counter(catalogue.TENANT_SERVICE)
        self.queue_wait_s = exporter.histogram(catalogue.TENANT_QUEUE_WAIT_S)


class TenantMeter:
    """The series of one tenant. `num_begun` of its requests go on; `idle_since_s` is when the last of them ended."""

    def __init__(self, families: TenantFamilies, tenant: str) -> None:
        self._owned = Owned()
        self.service = self._owned.of(families.service, tenant)
        self.queue_wait_s = self._owned.of(families.queue_wait_s, tenant)
        self.num_begun = 0
        self.idle_since_s = math.inf

    def close(self) -> None:
        """Drop its series."""
        self._owned.close()


class Begun:
    """A request that has begun, with as many of its tokens as are counted."""

    __slots__ = ("group", "meter", "num_counted")

    def __init__(self, group: RequestGroup, meter: TenantMeter) -> None:
        self.group = group
        self.meter = meter
        self.num_counted = 0


class TenantMeters:
    """Up to `limit` tenants by name, those that have been idle for `idle_s` seconds no longer.

    A tenant that is removed from the registry becomes idle, for gateways refuse its calls; replicas are not told of it.

    Used under a lock of its owner, but that any thread may iterate.
    """

    def __init__(self, exporter: Exporter, limit: int, idle_s: float, clock: Callable[[], float]) -> None:
        families = TenantFamilies(exporter)
        self._idle_s = idle_s
        self._clock = clock
        self._meters: Capped[str, TenantMeter] = Capped(limit, lambda tenant: TenantMeter(families, tenant), OTHER)
        self._begun: list[Begun] = []

    def __repr__(self) -> str:
        return f"TenantMeters({self._meters!r}, begun={len(self._begun)})"

    def __iter__(self) -> Iterator[str]:
        """The tenants with series of their own."""
        return (tenant for tenant, _ in self._meters)

    def begin(self, group: RequestGroup, waited_s: float) -> None:
        """A step works on a request for the first time."""
        meter = self._meters.of(group.tenant)
        meter.queue_wait_s.observe(waited_s)
        meter.service.inc(len(group.request.prompt))
        meter.num_begun += 1
        self._begun.append(Begun(group, meter))

    def count(self) -> int:
        """Count what was sampled since the last call, and return it."""
        now_s, total, going_on = self._clock(), 0, []
        for begun in self._begun:
            is_over = begun.group.is_ended  # asked first: what lands meanwhile is counted the next time
            num_output = begun.group.num_output
            begun.meter.service.inc(num_output - begun.num_counted)
            total += num_output - begun.num_counted
            begun.num_counted = num_output
            if is_over:
                begun.meter.num_begun -= 1
                begun.meter.idle_since_s = now_s
            else:
                going_on.append(begun)
        self._begun = going_on
        return total

    def sweep(self) -> None:
        """Drop the tenants that have been idle for long, as `count` has last seen them."""
        long_ago_s = self._clock() - self._idle_s
        for tenant, meter in self._meters:
            if not meter.num_begun and meter.idle_since_s <= long_ago_s:
                self._meters.drop(tenant)
                meter.close()
