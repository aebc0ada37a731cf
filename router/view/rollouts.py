"""What is on its way in the registry: versions that replicas have yet to stage, canaries, versions that drain."""

from collections.abc import Iterator, Sequence

from registry.types import AdapterRecord, Canary, Event, ReplicaRecord, VersionRecord, VersionState
from router.view.records import Rollout
from router.view.traffic import Traffic

REQUESTED = "activation_requested"
CANARY_SET = "canary_set"


class Rollouts:
    """Finds them in the catalog; the change log, as far as it is known, says since when and for which alias."""

    def __init__(self, replicas: Sequence[ReplicaRecord], events: Sequence[Event], traffic: Traffic) -> None:
        self._ready = [replica for replica in replicas if replica.is_ready]
        self._events = events
        self._traffic = traffic

    def of(self, adapters: Sequence[AdapterRecord]) -> tuple[Rollout, ...]:
        """Those that wait for replicas first."""
        order = ("activation", "canary", "draining")
        found = [rollout for adapter in adapters for rollout in self._of_adapter(adapter)]
        return tuple(sorted(found, key=lambda one: (order.index(one.kind), one.name, one.number)))

    def _of_adapter(self, adapter: AdapterRecord) -> Iterator[Rollout]:
        for version in adapter.versions:
            if version.digest in adapter.pending and version.state is VersionState.ACTIVE:
                yield self._activation(adapter, version)
            elif version.state is VersionState.DRAINING:
                yield self._rollout("draining", adapter, version, None, None)
        for alias, canary in adapter.canaries.items():
            canary_version = adapter.version(canary.number)
            if canary_version is not None:
                yield self._canary(adapter, canary_version, alias, canary)

    def _activation(self, adapter: AdapterRecord, version: VersionRecord) -> Rollout:
        event = self._event(REQUESTED, adapter.name, version.number)
        alias = None if event is None else event.detail.get("alias")
        weight = None if event is None or "weight" not in event.detail else float(event.detail["weight"])
        return self._rollout("activation", adapter, version, alias, event, weight)

    def _canary(self, adapter: AdapterRecord, version: VersionRecord, alias: str, canary: Canary) -> Rollout:
        event = self._event(CANARY_SET, adapter.name, canary.number)
        stable = adapter.aliases.get(alias)
        rollout = self._rollout("canary", adapter, version, alias, event, canary.weight)
        old = None if stable is None else self._traffic.of_version(adapter.name, stable)
        return rollout.model_copy(update={"new": self._traffic.of_version(adapter.name, version.number), "old": old})

    def _rollout(
        self,
        kind: str,
        adapter: AdapterRecord,
        version: VersionRecord,
        alias: str | None,
        event: Event | None,
        weight: float | None = None,
    ) -> Rollout:
        late = tuple(one.replica_id for one in self._ready if version.digest not in one.staged)
        return Rollout.model_validate(
            {
                "kind": kind,
                "name": adapter.name,
                "number": version.number,
                "alias": alias,
                "weight": weight,
                "since_s": None if event is None else event.at_s,
                "num_staged": len(self._ready) - len(late),
                "num_replicas": len(self._ready),
                "waiting_for": () if kind == "draining" else late,
                "until_s": version.drain_until_s,
                "new": None,
                "old": None,
            }
        )

    def _event(self, kind: str, name: str, number: int) -> Event | None:
        """The latest such event that is known."""
        about = (kind, name, number)
        return next((one for one in reversed(self._events) if (one.kind, one.name, one.number) == about), None)
