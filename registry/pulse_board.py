"""Where heartbeats meet: the last word of every replica and gateway, and the plan of homes that follows from them."""

import time
import uuid
from collections import Counter
from collections.abc import Callable

from registry.demand import DemandConfig, DemandPlanner
from registry.pulse import FleetPulse, GatewayPulse, ReplicaLoad, ReplicaPulse, Residency

STALE_S = 5.0
"""A member that was silent for so long is left out."""


class _Replica:
    def __init__(self) -> None:
        self.heard_at_s = 0.0
        self.load = ReplicaLoad()
        self.residency = Residency()
        self.changed = 0


class PulseBoard:
    """Synchronous and not thread-safe: it belongs to the registry actor's event loop."""

    def __init__(self, config: DemandConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._planner = DemandPlanner(config or DemandConfig(), clock())
        self._replicas: dict[str, _Replica] = {}
        self._gateways: dict[str, tuple[float, dict[str, int]]] = {}
        self._board_id = uuid.uuid4().hex
        self._sequence = 0

    def __repr__(self) -> str:
        return f"PulseBoard({len(self._replicas)} replicas, {len(self._gateways)} gateways, {self._planner!r})"

    def hear_replica(self, replica_id: str, pulse: ReplicaPulse) -> None:
        """Take a replica's heartbeat."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        replica.heard_at_s, replica.load = self._clock(), pulse.load
        if pulse.residency != replica.residency or not replica.changed:
            self._sequence += 1
            replica.residency, replica.changed = pulse.residency, self._sequence

    def forget_replica(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    def forget_gateway(self, gateway_id: str) -> None:
        self._gateways.pop(gateway_id, None)

    def exchange(self, pulse: GatewayPulse) -> FleetPulse:
        """Take a gateway's heartbeat; returns what it has yet to hear."""
        now_s = self._clock()
        self._drop_silent(now_s)
        self._gateways[pulse.gateway_id] = (now_s, dict(pulse.in_flight))
        if pulse.plan is not None:
            self._planner.adopt(pulse.plan, now_s)
        self._planner.observe(pulse.busy_s, pulse.base_busy_s, now_s)
        plan = self._planner.advance(len(self._replicas), now_s)
        seen = pulse.seen if pulse.board_id == self._board_id else 0
        others: Counter[str] = Counter()
        for gateway_id, (_, in_flight) in self._gateways.items():
            if gateway_id != pulse.gateway_id:
                others.update(in_flight)
        return FleetPulse(
            board_id=self._board_id,
            seen=self._sequence,
            plan=plan if plan.epoch > pulse.epoch else None,
            in_flight=dict(others),
            num_gateways=len(self._gateways),
            loads={replica_id: replica.load for replica_id, replica in self._replicas.items()},
            residency={
                replica_id: replica.residency
                for replica_id, replica in self._replicas.items()
                if replica.changed > seen
            },
        )

    def _drop_silent(self, now_s: float) -> None:
        late = [key for key, replica in self._replicas.items() if now_s - replica.heard_at_s > STALE_S]
        for replica_id in late:
            del self._replicas[replica_id]
        gone = [key for key, (heard_at_s, _) in self._gateways.items() if now_s - heard_at_s > STALE_S]
        for gateway_id in gone:
            del self._gateways[gateway_id]
