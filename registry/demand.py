"""How many homes each adapter shall have, from how much it is asked for. Pure: time comes with every call.

Demand is concurrency: request-seconds a second (Little's law), so that it counts slow requests for more than fast ones.
"""

import math
from collections.abc import Mapping

from pydantic import Field

from registry.pulse import HomePlan
from registry.types import Record

FORGET_BELOW = 1e-3
MARGIN = 0.1
"""Homes by which demand must exceed the present number before it grows, or fall short before it shrinks."""


class DemandConfig(Record):
    """How fast homes follow demand."""

    window_s: float = Field(default=10.0, gt=0)
    """Time constant of the smoothing."""
    requests_per_home: float = Field(default=8.0, gt=0)
    """An adapter has no more homes than it keeps this many requests in flight on each."""
    cool_down_s: float = Field(default=60.0, ge=0)
    """How long demand must have been lower before homes go, at most half of them at a time."""
    idle_s: float = Field(default=600.0, ge=0)
    """An adapter counts as in use for so long after its last request."""
    epoch_s: float = Field(default=2.0, gt=0)
    """Plans change at most this often."""


class Demand:
    """The smoothed concurrency of one adapter, and when it was last asked for."""

    __slots__ = ("concurrency", "low_since_s", "used_at_s")

    def __init__(self, now_s: float) -> None:
        self.concurrency = 0.0
        self.used_at_s = now_s
        self.low_since_s: float | None = None


class DemandPlanner:
    """Smooths what gateways report and makes plans of it."""

    def __init__(self, config: DemandConfig, now_s: float) -> None:
        self._config = config
        self._demands: dict[str, Demand] = {}
        self._base = 0.0
        self._smoothed_at_s = now_s
        self._waiting: dict[str, float] = {}
        self._waiting_base_s = 0.0
        self.plan = HomePlan()

    def __repr__(self) -> str:
        return f"DemandPlanner(epoch {self.plan.epoch}, {len(self._demands)} in use, {len(self.plan.num_homes)} spread)"

    def adopt(self, plan: HomePlan, now_s: float) -> None:
        """Go on from a plan that gateways follow already, if it is newer than this one's."""
        if plan.epoch <= self.plan.epoch:
            return
        self.plan = plan
        for name in plan.active:
            self._demands.setdefault(name, Demand(now_s))

    def observe(self, busy_s: Mapping[str, float], base_busy_s: float, now_s: float) -> None:
        """Count request-seconds that one gateway reports."""
        for name, seconds in busy_s.items():
            self._waiting[name] = self._waiting.get(name, 0.0) + seconds
            self._demands.setdefault(name, Demand(now_s)).used_at_s = now_s
        self._waiting_base_s += base_busy_s

    def advance(self, num_replicas: int, now_s: float) -> HomePlan:
        """The plan for this moment; a new one only when an epoch has passed and something changed."""
        elapsed_s = now_s - self._smoothed_at_s
        if elapsed_s < self._config.epoch_s:
            return self.plan
        self._smooth(elapsed_s)
        self._smoothed_at_s = now_s
        idle = [name for name, demand in self._demands.items() if now_s - demand.used_at_s > self._config.idle_s]
        for name in idle:
            del self._demands[name]
        counts = {name: self._num_homes(name, demand, num_replicas, now_s) for name, demand in self._demands.items()}
        active, spread = tuple(sorted(counts)), {name: count for name, count in counts.items() if count > 1}
        if (active, spread) != (self.plan.active, self.plan.num_homes):
            self.plan = HomePlan(epoch=self.plan.epoch + 1, active=active, num_homes=spread)
        return self.plan

    def concurrency(self, name: str) -> float:
        """Smoothed requests in flight of an adapter."""
        demand = self._demands.get(name)
        return 0.0 if demand is None else demand.concurrency

    def _smooth(self, elapsed_s: float) -> None:
        share = 1 - math.exp(-elapsed_s / self._config.window_s)
        for name, demand in self._demands.items():
            demand.concurrency += share * (self._waiting.get(name, 0.0) / elapsed_s - demand.concurrency)
            if demand.concurrency < FORGET_BELOW:
                demand.concurrency = 0.0
        self._base += share * (self._waiting_base_s / elapsed_s - self._base)
        self._waiting, self._waiting_base_s = {}, 0.0

    def _num_homes(self, name: str, demand: Demand, num_replicas: int, now_s: float) -> int:
        """Up at once; down by at most half after a cool-down."""
        now = self.plan.num_homes.get(name, 1)
        if self._wanted(demand, num_replicas, -MARGIN) > now:
            demand.low_since_s = None
            return self._wanted(demand, num_replicas, -MARGIN)
        wanted = self._wanted(demand, num_replicas, MARGIN)
        if wanted >= now:
            demand.low_since_s = None
            return now
        if demand.low_since_s is None:
            demand.low_since_s = now_s
        if now_s - demand.low_since_s < self._config.cool_down_s:
            return now
        demand.low_since_s = now_s
        return max(wanted, math.ceil(now / 2))

    def _wanted(self, demand: Demand, num_replicas: int, margin: float) -> int:
        """Replicas that an adapter needs: its share of the fleet's work, but none that it would leave idle."""
        total = self._base + math.fsum(demand.concurrency for demand in self._demands.values())
        if total <= 0:
            return 1
        by_share = demand.concurrency / total * num_replicas
        by_requests = demand.concurrency / self._config.requests_per_home
        return max(1, min(math.ceil(min(by_share, by_requests) + margin), num_replicas))
