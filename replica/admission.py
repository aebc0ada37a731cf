"""From waiting to admitted: whose turn it is, and the adapter slot each request needs first.

Knows the queue and the adapter leases, not KV blocks or batches. A request is charged when its turn comes; if its
adapter is still loading it waits aside and others go on. Whatever a request holds here is released in one place.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from replica.arrival_queue import Preference, WaitingQueue
from replica.errors import ReplicaError
from replica.sequence import Lease, RequestGroup
from replica.tenant_slots import TenantSlots


class Adapters(Protocol):
    """The adapter tiers as admission sees them; `acquire` never blocks, and may raise a ReplicaError.

    Slots that come free go to the oldest lease that is not ready, so each load ends as long as leases are released.
    """

    def acquire(self, digest: str) -> Lease: ...
    def load_s(self, digest: str) -> float: ...


class Admission:
    """The waiting queue, the requests whose adapter is loading, and the slots that admitted requests pin.

    With `patience_s`, a request that adds no adapter to those admitted may go ahead of one that does, as long as that
    was first passed less than `patience_s` seconds ago.

    Who begins the load of an adapter is charged for the time that loading it takes, as many tokens as the replica
    computes in that time: what those who lose its place in the slots pay to have theirs back. Whoever joins the load
    pays nothing; whoever leaves before its end has spent it all the same; one that fails costs nothing.
    """

    def __init__(
        self,
        queue: WaitingQueue[RequestGroup],
        adapters: Adapters,
        *,
        num_slots: int,
        max_loading: int,
        patience_s: float = 0.0,
        tokens_per_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._adapters = adapters
        self._num_slots = num_slots
        self._max_loading = max_loading
        self._patience_s, self._clock = patience_s, clock
        self._tokens_per_s = tokens_per_s
        self._tenant_slots = TenantSlots()
        self._loading: dict[str, RequestGroup] = {}
        self._resident: Counter[str] = Counter()
        """Adapter -> admitted requests that pin its slot."""
        self._charged: dict[str, RequestGroup] = {}
        """The requests that were charged and have not ended."""
        self._outstanding: Counter[str] = Counter()
        """Tenant -> output tokens that were charged and not sampled, less those sampled beyond what was charged."""
        queue.follow(self._outstanding.__getitem__)
        self._num_admitted = 0
        self._failed: list[tuple[RequestGroup, Exception]] = []

    def __repr__(self) -> str:
        return f"Admission(waiting={self.num_waiting}, loading={self.num_loading}, pinned={dict(self._resident)})"

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_charged(self) -> int:
        """Requests that were charged and have not ended."""
        return len(self._charged)

    def deficits(self) -> dict[str, float]:
        """What each tenant that waits may still be charged. Any thread may ask."""
        return self._queue.deficits()

    def push(self, group: RequestGroup) -> None:
        self._queue.push(group)

    def sampled(self, group: RequestGroup) -> None:
        """One of the output tokens that `group` was charged for is there."""
        self._outstanding[group.tenant] -= 1

    def loaded(self) -> list[RequestGroup]:
        """The requests whose adapter has come into a slot since the last call; those whose load failed are failed."""
        loaded = [group for group in tuple(self._loading.values()) if self._settle(group)]
        for group in loaded:
            group.ready_s = self._clock()
        return loaded

    def next(self) -> RequestGroup | None:
        """Admit the request whose turn it is and whose adapter is in a slot; None when no request can go on."""
        return self._admit_from(lambda: self._queue.take(self._may_admit, self._preference()))

    def next_claimed(self, claims: Callable[[RequestGroup], bool]) -> RequestGroup | None:
        """The like, when there is no room but for requests with a claim to it."""
        return self._admit_from(lambda: self._queue.take_ahead(self._may_admit, claims))

    def _admit_from(self, take: Callable[[], RequestGroup | None]) -> RequestGroup | None:
        while (group := take()) is not None:
            group.order = self._num_admitted
            self._num_admitted += 1
            group.admitted_s = self._clock()
            self._charged[group.key] = group
            self._tenant_slots.hold(group)
            self._outstanding[group.tenant] += group.output_cost
            if group.adapter is None or self._acquire(group, group.adapter):
                group.ready_s = group.admitted_s
                return group
        return None

    def take_failed(self) -> list[tuple[RequestGroup, Exception]]:
        """The requests whose adapter cannot be had, and why; whoever takes them ends and releases them."""
        failed, self._failed = self._failed, []
        return failed

    def release(self, group: RequestGroup) -> None:
        """Give back all that `group` holds: its place in the queue, its slot pin, and the charge it did not use."""
        if not group.is_admitted:
            self._queue.remove(group)
            return
        self._release_slot(group)
        del self._charged[group.key]
        self._tenant_slots.release(group)
        self._outstanding[group.tenant] -= group.num_outstanding
        if not self._outstanding[group.tenant]:
            del self._outstanding[group.tenant]
        self._queue.refund(group.tenant, group.num_unused)

    def _release_slot(self, group: RequestGroup) -> None:
        is_loading = self._loading.pop(group.key, None) is not None
        lease, group.lease = group.lease, None
        if lease is None or group.adapter is None:
            return
        if not is_loading:
            self._resident[group.adapter] -= 1
            if not self._resident[group.adapter]:
                del self._resident[group.adapter]
        lease.release()

    def _acquire(self, group: RequestGroup, adapter: str) -> bool:
        """Ask for the slot; True when it is there already."""
        try:
            group.lease = self._adapters.acquire(adapter)
        except ReplicaError as error:
            self._failed.append((group, error))
            return False
        if not group.lease.ready and all(each.adapter != adapter for each in self._loading.values()):
            group.num_load_tokens = math.ceil(self._adapters.load_s(adapter) * self._tokens_per_s())
            self._queue.refund(group.tenant, -group.num_load_tokens)
        self._loading[group.key] = group
        return self._settle(group)

    def _settle(self, group: RequestGroup) -> bool:
        """Move a loading request on if its load has ended; True when it pins a slot now."""
        assert group.lease is not None
        assert group.adapter is not None
        error = group.lease.error
        if error is not None:
            self._release_slot(group)
            self._queue.refund(group.tenant, group.num_load_tokens)
            self._failed.append((group, error))
            return False
        if group.lease.ready:
            del self._loading[group.key]
            self._resident[group.adapter] += 1
            return True
        return False

    def _preference(self) -> Preference[RequestGroup] | None:
        if not self._patience_s:
            return None
        admitted = {None, *self._resident, *(group.adapter for group in self._loading.values())}
        return Preference(lambda group: group.adapter in admitted, self._patience_s, self._clock())

    def _may_admit(self, group: RequestGroup) -> bool:
        """Whether taking `group` next would only use a pinned slot, or join a load for which there is room."""
        if not self._tenant_slots.may_hold(group):
            return False
        adapter = group.adapter
        loading = {each.adapter for each in self._loading.values()}
        if adapter is None or (adapter in self._resident and adapter not in loading):
            return True
        if len(self._loading) >= self._max_loading:
            return False
        return adapter in loading or len(loading) < self._num_slots

    def check_integrity(self, admitted: Iterable[RequestGroup]) -> None:
        """Assert that the pins are those of `admitted`, the requests beyond this stage that have not ended."""
        admitted = tuple(admitted)
        holders = [group for group in admitted if group.adapter is not None]
        assert all(group.lease is not None and group.lease.ready for group in holders), (
            "an admitted request lost its slot"
        )
        pinned = Counter(group.adapter for group in holders)
        assert pinned == self._resident, f"requests pin {dict(pinned)}, counts say {dict(self._resident)}"
        assert {group.key for group in admitted} <= self._charged.keys(), "an admitted request is not known as charged"
        outstanding = Counter[str]()
        for group in self._charged.values():
            outstanding[group.tenant] += group.num_outstanding
        assert outstanding == self._outstanding, f"{dict(outstanding)} are to come, counts say {self._outstanding}"
        assert self._charged or not (self._resident or self._tenant_slots), "pins without requests"
        assert not any(group.is_admitted for group in self._queue), "an admitted request is still queued"
