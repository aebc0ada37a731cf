"""The tables that kernels read: for every slot and site where A and B lie, the rank and the scale."""

import numpy as np
import torch

from replica.adapters.weights import ImageLayout


class SlotTables:
    """Contiguous device tensors of shape [num_slots, num_sites]. Rank 0 says: this slot does not touch this site.

    `a_offsets` and `b_offsets` are int64, in elements from the start of the arena; `ranks` int32; `scales` float32.
    A row is written by copies on the current stream: after the steps launched before, ahead of those that come, and
    without waiting for either.
    """

    def __init__(self, num_slots: int, num_sites: int, device: torch.device) -> None:
        shape = (num_slots, num_sites)
        self.a_offsets = torch.zeros(shape, dtype=torch.int64, device=device)
        self.b_offsets = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self._on_gpu = device.type == "cuda"
        self._row = np.dtype([(name, _NUMPY[table.dtype], num_sites) for name, table in self._tables()])
        self.write(0, 0, ImageLayout(torch.uint8, (), 0))  # torch's first page-locked memory takes a moment

    def write(self, slot: int, start: int, layout: ImageLayout) -> None:
        """Point a slot at an image that begins at element `start` of the arena; nothing of an older row stays."""
        columns = layout.columns
        row = np.zeros((), dtype=self._row)
        row["a_offsets"][columns.sites] = columns.a_offsets + start
        row["b_offsets"][columns.sites] = columns.b_offsets + start
        row["ranks"][columns.sites] = columns.ranks
        row["scales"][columns.sites] = columns.scales
        source = torch.from_numpy(row.reshape(1).view(np.uint8))
        if self._on_gpu:
            source = source.pin_memory()  # torch keeps it until the copies are done: rows never share memory
        place = 0
        for _, table in self._tables():
            num_bytes = table.shape[1] * table.itemsize
            table[slot].copy_(source[place : place + num_bytes].view(table.dtype), non_blocking=True)
            place += num_bytes

    def clear(self, slot: int) -> None:
        """Make a slot touch nothing."""
        for _, table in self._tables():
            table[slot].zero_()

    def is_clear(self, slot: int) -> bool:
        return not any(bool(table[slot].any()) for _, table in self._tables())

    def _tables(self) -> tuple[tuple[str, torch.Tensor], ...]:
        return (
            ("a_offsets", self.a_offsets),
            ("b_offsets", self.b_offsets),
            ("ranks", self.ranks),
            ("scales", self.scales),
        )


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
