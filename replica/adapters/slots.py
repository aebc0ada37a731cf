"""Device memory for adapters: one preallocated arena, cut into extents that slots own. Knows nothing of requests.

Only the step thread uses it, between steps. Everything it does on a CUDA device is ordered after the steps launched
before, on the current stream.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

import torch

from replica.adapters.extents import ExtentMap, Move
from replica.adapters.slot_tables import SlotTables
from replica.adapters.weights import ImageLayout, alignment_elements, view_pairs
from replica.errors import OutOfMemory
from replica.model.batch import LoraPair

_BOUNCE_ELEMENTS = 1 << 20


class SlotState(StrEnum):
    """`loading`: an extent is there, the bytes are not yet. `resident`: kernels may read it."""

    FREE = "free"
    LOADING = "loading"
    RESIDENT = "resident"


class _Slot:
    __slots__ = ("layout", "pairs", "state")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.layout: ImageLayout | None = None
        self.pairs: Mapping[int, LoraPair] = {}


class SlotArena:
    """`num_slots` slots over `arena_bytes` of `device` memory; both limits hold.

    An image takes its `num_bytes`, a multiple of 128, and nothing more: a budget of exactly one image holds it.
    Raises OutOfMemory when the device cannot hold the arena.
    """

    def __init__(
        self, num_slots: int, arena_bytes: int, num_sites: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        alignment = alignment_elements(dtype)
        capacity = arena_bytes // dtype.itemsize // alignment * alignment
        try:
            self.memory = torch.zeros(capacity, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(f"adapters.arena_bytes is {arena_bytes}; {device} cannot hold them: {error}") from error
        self.tables = SlotTables(num_slots, num_sites, device)
        self._extents = ExtentMap(capacity)
        self._slots = [_Slot() for _ in range(num_slots)]

    def __repr__(self) -> str:
        used = len(self._slots) - self.num_free_slots
        return f"SlotArena({used} of {len(self._slots)} slots, {self.free_bytes} of {self.num_bytes} bytes free)"

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free_slots(self) -> int:
        return sum(slot.state is SlotState.FREE for slot in self._slots)

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() * self.memory.dtype.itemsize

    @property
    def free_bytes(self) -> int:
        return self._extents.free_size * self.memory.dtype.itemsize

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state

    def allocate(self, layout: ImageLayout) -> int | None:
        """Take the lowest free slot and an extent for an image; None when there is no slot or no hole so large."""
        index = next((i for i, slot in enumerate(self._slots) if slot.state is SlotState.FREE), None)
        if index is None or self._extents.allocate(index, layout.num_elements) is None:
            return None
        self._slots[index].state = SlotState.LOADING
        self._slots[index].layout = layout
        return index

    def start(self, slot: int) -> int:
        """Where a slot's extent begins, in elements. It stays while the slot is loading."""
        return self._extents[slot].start

    def publish(self, slot: int, pairs: Mapping[int, LoraPair]) -> None:
        """The image is in place: let kernels read it. `pairs` are views of this slot's extent."""
        record = self._slots[slot]
        assert record.state is SlotState.LOADING, slot
        assert record.layout is not None
        self.tables.write(slot, self.start(slot), record.layout)
        record.pairs = pairs
        record.state = SlotState.RESIDENT

    def pairs(self, slot: int) -> Mapping[int, LoraPair]:
        """Site index -> views of the slot's pair. Good until the next `compact`, which gives a new mapping."""
        assert self._slots[slot].state is SlotState.RESIDENT, slot
        return self._slots[slot].pairs

    def free(self, slot: int) -> None:
        """Give up a slot: its tables are cleared, so that nothing of this image can be reached again."""
        assert self._slots[slot].state is not SlotState.FREE, slot
        self.tables.clear(slot)
        self._extents.free(slot)
        self._slots[slot] = _Slot()

    def compact(self, num_bytes: int) -> int:
        """Move resident images, pinned ones too, until there is a hole of `num_bytes`; returns the bytes moved.

        The caller is between two steps, so nobody holds views. Loading slots stay where they are; when they are in
        the way, nothing moves.
        """
        moves = self._extents.plan_moves(num_bytes // self.memory.dtype.itemsize, self._loading())
        for move in moves or ():
            self._move(move)
        return sum(move.source.size for move in moves or ()) * self.memory.dtype.itemsize

    def check_integrity(self) -> None:
        """Extents and slots agree, extents do not overlap, and the tables of slots not in use are empty."""
        self._extents.check_integrity()
        assert self._extents.owners() == {i for i, slot in enumerate(self._slots) if slot.state is not SlotState.FREE}
        for index, slot in enumerate(self._slots):
            assert self.tables.is_clear(index) == (slot.state is not SlotState.RESIDENT), index
            assert bool(slot.pairs) == (slot.state is SlotState.RESIDENT), index

    def _loading(self) -> Collection[int]:
        return {index for index, slot in enumerate(self._slots) if slot.state is SlotState.LOADING}

    def _move(self, move: Move) -> None:
        slot = self._slots[move.owner]
        assert slot.layout is not None
        self._copy_down(move.source.start, move.target.start, move.source.size)
        self._extents.apply(move)
        self.tables.write(move.owner, move.target.start, slot.layout)
        slot.pairs = view_pairs(self.memory, move.target.start, slot.layout)

    def _copy_down(self, source: int, target: int, size: int) -> None:
        """Copy within the arena towards its start, piece by piece through a bounce buffer: the two may overlap."""
        for offset in range(0, size, _BOUNCE_ELEMENTS):
            count = min(_BOUNCE_ELEMENTS, size - offset)
            piece = self.memory[source + offset : source + offset + count].clone()
            self.memory[target + offset : target + offset + count].copy_(piece)
