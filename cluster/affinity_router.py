"""The Serve face of placement: sends a call to the replica that the gateway chose.

The gateway places every request itself (`router.placement`), so that load is a lease counted in one synchronous step;
this class only carries the decision out. A call names its replica with the keyword argument `replica_id`. Calls that
name no replica, but an adapter (`adapter`), are ranked by the same rendezvous hash; anything else goes to the least
loaded.

Serve pickles this module by value into every process that holds a handle: keep its globals trivially picklable.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.affinity import AffinityPolicy
from router.preferences import Member, hash64


class AffinityRouter(RequestRouter):
    """Ranks Serve's running replicas for one call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending_by_metadata: dict[int, PendingRequest] = {}

    def initialize_state(self, load_factor: float = 1.25, min_load_bound: int = 16, home_factor: float = 1.1) -> None:
        """Takes `router.config.PlacementConfig`'s bounds; Serve calls it once with the router's keyword arguments."""
        self._policy = AffinityPolicy(load_factor, min_load_bound, home_factor)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica alone; when it has vanished any other, so that a call for it still gets an answer.

        Without any replica the call waits for one as long as its caller does; ServeFleet sets every call a time.
        """
        if pending_request is not None:
            # Without this Serve retries with no sleep in between when every rank is full, or when there is none.
            pending_request.routing_context.should_backoff = True
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas] if candidate_replicas else []
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        target = pending_request.kwargs.get("replica_id")
        if target in by_id:
            return [[by_id[target]]]
        adapter = pending_request.kwargs.get("adapter")
        if adapter is None:
            return [list(candidate_replicas)]
        return [[by_id[replica_id]] for replica_id in self._rank(adapter, by_id)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this the moment a replica starts to run or to stop; the gateway reads it from `RUNNING`."""
        super().update_replicas(replicas)
        # Imported here: this module's globals are a copy in each class that Serve unpickled.
        from cluster.running import RUNNING

        RUNNING.tell(self._deployment_id.name, [replica.replica_id.unique_id for replica in replicas])

    def _rank(self, adapter: str, by_id: dict[str, RunningReplica]) -> Sequence[str]:
        """The affinity policy over what Serve knows: its own count of calls under way, and no ring ids."""
        self._policy.update((adapter,), (Member(hash64(replica_id), replica_id) for replica_id in by_id))
        cached = {replica_id: self.replica_queue_len_cache.get(by_id[replica_id].replica_id) for replica_id in by_id}
        return self._policy.rank(adapter, {replica_id: load or 0 for replica_id, load in cached.items()})

    # Serve 2.60 indexes pending requests by an id that concurrent calls of one parent request share, and all but one
    # of them then hang. The metadata object is unique to a call, so index by its identity.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending_by_metadata[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending_by_metadata.pop(id(pending_request.metadata), None)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any | None = None
    ) -> PendingRequest | None:
        pending = self._pending_by_metadata.get(id(request_metadata))
        return pending if pending is not None and not pending.future.done() else None
