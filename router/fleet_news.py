"""What this gateway last heard of the fleet: loads from other gateways, who has which adapter, the plan of homes.

News that has become too old counts for nothing, so that a choice depends on what is known and not on what was.
"""

from collections.abc import Iterable, Mapping

from registry.pulse import FleetPulse, GatewayPulse, HomePlan, ReplicaLoad
from router.affinity import COLD, IN_HOST, IN_SLOT, Standing, unknown
from router.homes import Demand


class FleetNews:
    """Keeps the newest pulse. `stale_s`: how long it counts."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._heard_at_s: float | None = None
        self._board_id = ""
        self._seen = 0
        self._tells_plan = False
        self._plan = HomePlan()
        self._others: Mapping[str, int] = {}
        self.num_gateways = 1
        self._loads: Mapping[str, ReplicaLoad] = {}
        self._slots: dict[str, frozenset[str]] = {}
        self._hosts: dict[str, frozenset[str]] = {}
        self.demand = Demand()

    def __repr__(self) -> str:
        return f"FleetNews(epoch {self._plan.epoch}, {len(self._loads)} replicas)"

    def hear(self, pulse: FleetPulse, now_s: float) -> bool:
        """Take the registry's answer; returns whether the plan of homes changed."""
        # A registry that runs older code does not say it; what it sends is not validated again.
        self.num_gateways = getattr(pulse, "num_gateways", 1)
        self._heard_at_s = now_s
        if pulse.board_id != self._board_id:
            self._tells_plan = self._plan.epoch > 0
            self._slots, self._hosts = {}, {}
        else:
            self._tells_plan = False
        self._board_id, self._seen = pulse.board_id, pulse.seen
        self._others, self._loads = pulse.in_flight, pulse.loads
        for replica_id, residency in pulse.residency.items():
            self._slots[replica_id] = frozenset(residency.resident)
            self._hosts[replica_id] = frozenset(residency.host_cached)
        for replica_id in self._slots.keys() - pulse.loads.keys():
            del self._slots[replica_id], self._hosts[replica_id]
        return self._follow(pulse.plan)

    def _follow(self, plan: HomePlan | None) -> bool:
        if plan is None or plan.epoch <= self._plan.epoch:
            return False
        self._plan = plan
        self.demand = Demand(frozenset(plan.active) or None, plan.num_homes)
        return True

    def is_fresh(self, now_s: float) -> bool:
        return self._heard_at_s is not None and now_s - self._heard_at_s <= self._stale_s

    def others(self, now_s: float) -> Mapping[str, int]:
        """Requests of the other gateways by replica."""
        return self._others if self.is_fresh(now_s) else {}

    def loads(self, now_s: float) -> Mapping[str, ReplicaLoad]:
        """What replicas last said of themselves."""
        return self._loads if self.is_fresh(now_s) else {}

    def standing(self, digest: str | None, now_s: float) -> Standing:
        """How near the version is to being served, replica by replica."""
        if digest is None or not self.is_fresh(now_s):
            return unknown

        def stands(replica_id: str) -> int:
            if digest in self._slots.get(replica_id, ()):
                return IN_SLOT
            return IN_HOST if digest in self._hosts.get(replica_id, ()) else COLD

        return stands

    def pulse(
        self,
        gateway_id: str,
        interval_s: float,
        busy_s: Mapping[str | None, float],
        in_flight: Mapping[str, int],
        gone: Iterable[str],
    ) -> GatewayPulse:
        """The heartbeat to send next. Of `busy_s`, None is the base."""
        return GatewayPulse(
            gateway_id=gateway_id,
            interval_s=interval_s,
            busy_s={name: seconds for name, seconds in busy_s.items() if name is not None},
            base_busy_s=busy_s.get(None, 0.0),
            in_flight=dict(in_flight),
            gone=tuple(sorted(gone)),
            board_id=self._board_id,
            seen=self._seen,
            epoch=self._plan.epoch,
            plan=self._plan if self._tells_plan else None,
        )
