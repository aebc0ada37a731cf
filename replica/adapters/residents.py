"""Which adapters are in slots, who pins them, and who makes room. Knows nothing of files or threads.

A pinned slot is never evicted. When even giving up everything unpinned would not make room for the oldest waiter, a
*reservation* holds for it what is free or comes free: reserved slots take no new pins. After a patient while pinned
slots are drained as well, so that adapters in constant use cannot keep a newcomer out for ever; kept ones only as far
as all the rest of the arena is too small.
"""

import logging
from collections.abc import Collection, Mapping

from replica.adapters.eviction import GreedyDualPolicy
from replica.adapters.slots import SlotArena, SlotState
from replica.adapters.weights import ImageLayout
from replica.messages import SlotView
from replica.model.batch import LoraPair

logger = logging.getLogger(__name__)


class Resident:
    """An adapter in a slot, with its number of pins. `closed`: no new pins (reserved, or forgotten). `kept`: one of the
    pins is there to keep it in its slot (`replica.adapters.keeper`), and ends only when that sees it closed."""

    __slots__ = ("closed", "digest", "forgotten", "kept", "num_bytes", "num_pins", "slot")

    def __init__(self, digest: str, slot: int, num_bytes: int) -> None:
        self.digest = digest
        self.slot = slot
        self.num_bytes = num_bytes
        self.num_pins = 0
        self.closed = False
        self.forgotten = False
        self.kept = False

    def __repr__(self) -> str:
        return f"Resident({self.digest[:8]}, slot {self.slot}, {self.num_pins} pins, closed={self.closed})"


class Residents:
    """The adapters in the slots of one arena. Only the step thread uses it."""

    def __init__(self, arena: SlotArena, policy: GreedyDualPolicy) -> None:
        self.arena = arena
        self.policy = policy
        self.num_evictions = 0
        self.num_withdrawn = 0
        self._by_digest: dict[str, Resident] = {}
        self._leaving: set[Resident] = set()
        self._reserved = False

    def __repr__(self) -> str:
        return f"Residents({len(self._by_digest)} resident, {len(self._leaving)} leaving, {self.arena!r})"

    def digests(self) -> tuple[str, ...]:
        return tuple(self._by_digest)

    def find(self, digest: str) -> Resident | None:
        """The resident that may be pinned, or None."""
        resident = self._by_digest.get(digest)
        return None if resident is None or resident.closed else resident

    def pin(self, resident: Resident) -> None:
        assert not resident.closed, resident
        resident.num_pins += 1

    def unpin(self, resident: Resident) -> None:
        assert resident.num_pins > 0, resident
        resident.num_pins -= 1
        if resident.num_pins > 0:
            return
        if resident.forgotten:
            self._leaving.remove(resident)
            self.arena.free(resident.slot)
        elif self._reserved:
            resident.closed = True

    def publish(
        self, digest: str, slot: int, num_bytes: int, pairs: Mapping[int, LoraPair], num_pins: int, forgotten: bool
    ) -> Resident:
        """The bytes are in the slot: the adapter is resident, pinned by those who waited for it.

        A `forgotten` one serves only them, and may leave again at once.
        """
        self.arena.publish(slot, pairs)
        resident = Resident(digest, slot, num_bytes)
        resident.num_pins = num_pins
        assert forgotten or digest not in self._by_digest, digest
        self._by_digest.setdefault(digest, resident)
        if forgotten:
            self._retire(resident)
        return resident

    def forget(self, digest: str) -> None:
        """Take no more pins on an adapter, and free its slot as soon as it has none."""
        self.policy.forget(digest)
        resident = self._by_digest.get(digest)
        if resident is not None:
            self._retire(resident)

    def make_room(self, layout: ImageLayout, may_move: bool) -> int | None:
        """A slot for an image, after giving up as few unpinned adapters as it takes; None when there is no room.

        Nothing is given up unless that makes enough room in all. The room may still be in pieces: without `may_move`,
        or while a loading slot stands between them. Then None, and a later call finds the room.
        """
        self.cancel_reservation()
        if not self._could_fit(layout.num_bytes, self._unpinned()):
            return None
        while not self._could_fit(layout.num_bytes, ()):
            self._evict(self.policy.victim(self._unpinned()))
        slot = self.arena.allocate(layout)
        if slot is None and may_move:
            self.arena.compact(layout.num_bytes)
            slot = self.arena.allocate(layout)
        return slot

    def reserve(self, num_bytes: int, drain: bool) -> None:
        """Keep what is free or comes free for one waiter; with `drain`, close pinned slots until they would do."""
        self._reserved = True
        for digest in self._unpinned():
            self._by_digest[digest].closed = True
        if not drain:
            return
        self._close_kept(num_bytes)
        others = [resident for resident in self._by_digest.values() if not resident.kept]
        for resident in sorted(others, key=lambda one: (one.num_pins, self.policy.rank(one.digest))):
            closed = [one.digest for one in self._by_digest.values() if one.closed]
            if self._could_fit(num_bytes, closed):
                return
            resident.closed = True

    def _close_kept(self, num_bytes: int) -> None:
        """Close the least used of the kept, until all that is not kept would be enough if it came free."""
        kept = [resident for resident in self._by_digest.values() if resident.kept]
        num_slots = self.arena.num_slots - len(kept)
        free_bytes = self.arena.num_bytes - sum(resident.num_bytes for resident in kept)
        for resident in sorted(kept, key=lambda one: self.policy.rank(one.digest)):
            if num_slots > 0 and free_bytes >= num_bytes:
                return
            resident.closed = True
            num_slots += 1
            free_bytes += resident.num_bytes

    def cancel_reservation(self) -> None:
        self._reserved = False
        for resident in self._by_digest.values():
            resident.closed = False

    def views(self, loading: Mapping[int, str]) -> tuple[SlotView, ...]:
        """Every slot by index; `loading` names the adapters of those that are being filled. Safe from any thread."""
        owners = {resident.slot: resident for resident in (*tuple(self._by_digest.values()), *tuple(self._leaving))}
        return tuple(self._view(slot, owners.get(slot), loading.get(slot)) for slot in range(self.arena.num_slots))

    def _view(self, slot: int, owner: Resident | None, loading: str | None) -> SlotView:
        if owner is not None:
            return SlotView("pinned" if owner.num_pins else "resident", owner.digest, owner.num_pins - owner.kept)
        is_loading = self.arena.state(slot) is SlotState.LOADING
        return SlotView("loading", loading) if is_loading else SlotView("free")

    def num_in_state(self) -> dict[str, int]:
        """How many slots are free, loading, resident (unpinned) and pinned."""
        states = [self.arena.state(slot) for slot in range(self.arena.num_slots)]
        pinned = len(self._leaving) + sum(resident.num_pins > 0 for resident in tuple(self._by_digest.values()))
        return {
            "free": states.count(SlotState.FREE),
            "loading": states.count(SlotState.LOADING),
            "resident": states.count(SlotState.RESIDENT) - pinned,
            "pinned": pinned,
        }

    def check_integrity(self) -> None:
        """Every resident slot has one owner, and only pinned ones are leaving."""
        self.arena.check_integrity()
        residents = [*self._by_digest.values(), *self._leaving]
        slots = sorted(resident.slot for resident in residents)
        states = [self.arena.state(slot) for slot in range(self.arena.num_slots)]
        assert slots == [slot for slot, state in enumerate(states) if state is SlotState.RESIDENT], residents
        assert all(resident.num_pins > 0 for resident in self._leaving), self._leaving
        assert self._reserved or not any(resident.closed for resident in self._by_digest.values()), residents

    def num_pins(self) -> int:
        return sum(resident.num_pins for resident in (*self._by_digest.values(), *self._leaving))

    def _retire(self, resident: Resident) -> None:
        if self._by_digest.get(resident.digest) is resident:
            del self._by_digest[resident.digest]
        self.num_withdrawn += 1
        resident.closed = resident.forgotten = True
        if resident.num_pins > 0:
            self._leaving.add(resident)
        else:
            self.arena.free(resident.slot)

    def _unpinned(self) -> list[str]:
        return [digest for digest, resident in self._by_digest.items() if resident.num_pins == 0]

    def _could_fit(self, num_bytes: int, given_up: Collection[str]) -> bool:
        num_slots = self.arena.num_free_slots + len(given_up)
        free_bytes = self.arena.free_bytes + sum(self._by_digest[digest].num_bytes for digest in given_up)
        return num_slots > 0 and free_bytes >= num_bytes

    def _evict(self, digest: str) -> None:
        resident = self._by_digest.pop(digest)
        assert resident.num_pins == 0, resident
        self.policy.evicted(digest)
        self.arena.free(resident.slot)
        self.num_evictions += 1
        logger.info("adapter evicted", extra={"fields": {"digest": digest[:12], "slot": resident.slot}})
