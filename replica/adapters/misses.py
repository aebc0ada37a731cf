"""The way of an adapter that is not resident: to the host, into line for room, into its slot.

Only the step thread uses it; the work itself is done by `ImageLoader` and `CopyQueue`. Room is given in the order of
arrival among the waiters whose bytes are in hand: a slow fetch keeps no slot idle.
"""

import logging
from collections import Counter
from collections.abc import Callable

from replica.adapters.copier import CopyQueue, SlotCopy
from replica.adapters.host_cache import HostCache
from replica.adapters.load_cost import LoadCost
from replica.adapters.loader import ImageLoader, Loaded
from replica.adapters.residents import Residents
from replica.adapters.stats import LoadTimes
from replica.adapters.waiters import Claim, Waiter, WaiterQueue, WaiterState
from replica.errors import ReplicaError

logger = logging.getLogger(__name__)


class MissPath:
    """Who waits for which adapter, and what is done about it. `loads` counts copies by where their bytes came from."""

    def __init__(
        self,
        loader: ImageLoader,
        host: HostCache,
        residents: Residents,
        copies: CopyQueue,
        times: LoadTimes,
        clock: Callable[[], float],
        drain_after_s: float,
    ) -> None:
        self._loader, self._host, self._residents, self._copies = loader, host, residents, copies
        self._times, self._clock = times, clock
        self._drain_after_s = drain_after_s
        self.waiters = WaiterQueue()
        self.loads: Counter[str] = Counter()
        self.cost = LoadCost()
        """Of reading and copying what came into a slot; of what was in the host for other reasons, of copying alone."""
        self.copying: dict[int, str] = {}
        """Slot -> the digest that is being copied into it."""

    def join(self, digest: str, claim: Claim) -> None:
        """Wait for an adapter; its load starts now if nobody waits for it yet. Raises as `ImageLoader.check` does."""
        waiter = self.waiters.find(digest) or self._start(digest)
        waiter.claims.append(claim)

    def withdraw(self, claim: Claim) -> None:
        """Wait no more; the last claim takes its waiter along, unless the copy is already under way."""
        waiter = next(one for one in self.waiters if claim in one.claims)
        waiter.claims.remove(claim)
        if not waiter.claims and waiter.state is not WaiterState.COPYING:
            self.waiters.remove(waiter)

    def forget(self, digest: str) -> None:
        """Those who wait are served once more; later ones start anew."""
        for waiter in self.waiters.of(digest):
            waiter.forgotten = True

    def settle(self) -> None:
        """Take note of the loads and copies that ended."""
        for loaded in self._loader.settled():
            for waiter in self.waiters.of(loaded.digest):
                if waiter.state is WaiterState.LOADING:
                    self._on_loaded(waiter, loaded)
        for copy in self._copies.finished():
            self._on_copied(copy)

    def give_room(self, may_move: bool) -> None:
        """Start the copies that there is room for; the oldest waiter without room keeps what comes free."""
        for waiter in self.waiters.in_hand():
            self._residents.cancel_reservation()
            if not self._bind(waiter) and not self._start_copy(waiter, may_move):
                return
        self._residents.cancel_reservation()
        for waiter in self.waiters:
            self._bind(waiter)

    def _bind(self, waiter: Waiter) -> bool:
        """Let a waiter use the slot that its adapter still has (it was closed for a reservation that ended)."""
        resident = self._residents.find(waiter.digest)
        if resident is None or waiter.state is WaiterState.COPYING:
            return False
        self.waiters.remove(waiter)
        for claim in waiter.claims:
            self._residents.pin(resident)
            claim.bind(resident)
        return True

    def _start_copy(self, waiter: Waiter, may_move: bool) -> bool:
        """False when there is no room now; what comes free is then reserved for this waiter."""
        borrowed = self._host.borrow(waiter.digest)
        image = borrowed.image if borrowed else waiter.image
        if image is None:
            self._load_again(waiter)
            return True
        slot = self._residents.make_room(image.layout, may_move)
        if slot is None:
            if borrowed is not None:
                borrowed.cancel()
            self._residents.reserve(image.num_bytes, self._clock() - waiter.in_hand_s >= self._drain_after_s)
            return False
        source, read_s = (borrowed.source, borrowed.read_s) if borrowed else (waiter.tier, waiter.read_s)
        self._submit(SlotCopy(waiter, slot, image, borrowed, source, read_s, self._clock()))
        return True

    def _load_again(self, waiter: Waiter) -> None:
        """The host cache dropped the image before there was room: load it once more, to hold on to, one at a time."""
        if self.waiters.holder in (None, waiter):
            self.waiters.holder = waiter
            waiter.state = WaiterState.LOADING
            self._loader.request(waiter.digest, hold=True)

    def _start(self, digest: str) -> Waiter:
        """A new waiter, with its load under way."""
        waiter = Waiter(digest, self._clock())
        if self._loader.bring(digest):
            waiter.state = WaiterState.IN_HAND
        self.waiters.append(waiter)
        return waiter

    def _on_loaded(self, waiter: Waiter, loaded: Loaded) -> None:
        if loaded.error is not None:
            self._fail(waiter, loaded.error)
            return
        waiter.state = WaiterState.IN_HAND
        waiter.tier = loaded.tier
        waiter.load_seconds, waiter.read_s = loaded.seconds, loaded.read_s
        if self.waiters.holder is waiter:
            waiter.image = loaded.image
        else:
            waiter.in_hand_s = loaded.ended_s

    def _fail(self, waiter: Waiter, error: ReplicaError) -> None:
        self.waiters.remove(waiter)
        for claim in waiter.claims:
            claim.fail(error)

    def _submit(self, copy: SlotCopy) -> None:
        waiter = copy.waiter
        waiter.state = WaiterState.COPYING
        waiter.image = None
        if self.waiters.holder is waiter:
            self.waiters.holder = None
        self.loads[copy.source] += 1
        self.copying[copy.slot] = waiter.digest
        self._times.observe("wait", copy.started_s - waiter.in_hand_s, copy.source)
        self._copies.submit(copy, self._residents.arena.start(copy.slot))

    def _on_copied(self, copy: SlotCopy) -> None:
        waiter, now_s = copy.waiter, self._clock()
        del self.copying[copy.slot]
        if copy.pairs is None:
            assert copy.error is not None
            self._residents.arena.free(copy.slot)
            self._fail(waiter, copy.error)
            return
        self.waiters.remove(waiter)
        resident = self._residents.publish(
            waiter.digest, copy.slot, copy.image.num_bytes, copy.pairs, len(waiter.claims), waiter.forgotten
        )
        for claim in waiter.claims:
            claim.bind(resident)
        self.cost.add(copy.image.num_bytes, copy.read_s + copy.copy_s)
        self._times.observe("publish", now_s - copy.ended_s, copy.source)
        self._times.observe("total", now_s - waiter.arrived_s, copy.source)
        seconds = waiter.load_seconds + now_s - copy.started_s
        fields = {"digest": waiter.digest[:12], "tier": waiter.tier, "slot": copy.slot, "bytes": copy.image.num_bytes}
        logger.info("adapter loaded", extra={"fields": {**fields, "ms": round((now_s - waiter.arrived_s) * 1e3, 3)}})
        self._residents.policy.loaded(waiter.digest, copy.image.num_bytes, seconds)

    def check_integrity(self) -> None:
        """Nobody waits for nothing, and every loading slot has its copy."""
        assert all(one.claims or one.state is WaiterState.COPYING for one in self.waiters), list(self.waiters)
        copying = sum(one.state is WaiterState.COPYING for one in self.waiters)
        assert copying == len(self.copying) == self._residents.num_in_state()["loading"], list(self.waiters)
