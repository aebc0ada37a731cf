"""The tables that kernels read: for every slot and site where A and B lie, the rank and the scale."""

import torch

from replica.adapters.weights import ImageLayout


class SlotTables:
    """Device tensors of shape [num_slots, num_sites]. Rank 0 says: this slot does not touch this site.

    `a_offsets` and `b_offsets` are int64, in elements from the start of the arena; `ranks` int32; `scales` float32.
    """

    def __init__(self, num_slots: int, num_sites: int, device: torch.device) -> None:
        shape = (num_slots, num_sites)
        self.a_offsets = torch.zeros(shape, dtype=torch.int64, device=device)
        self.b_offsets = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device)

    def write(self, slot: int, start: int, layout: ImageLayout) -> None:
        """Point a slot at an image that begins at element `start` of the arena; nothing of an older row stays."""
        offsets = torch.zeros((2, self.ranks.shape[1]), dtype=torch.int64)
        ranks = torch.zeros(self.ranks.shape[1], dtype=torch.int32)
        scales = torch.zeros(self.ranks.shape[1], dtype=torch.float32)
        sites = [place.site for place in layout.places]
        offsets[0, sites] = torch.tensor([start + place.a_offset for place in layout.places])
        offsets[1, sites] = torch.tensor([start + place.b_offset for place in layout.places])
        ranks[sites] = torch.tensor([place.rank for place in layout.places], dtype=torch.int32)
        scales[sites] = torch.tensor([place.scale for place in layout.places], dtype=torch.float32)
        self.a_offsets[slot].copy_(offsets[0], non_blocking=True)
        self.b_offsets[slot].copy_(offsets[1], non_blocking=True)
        self.ranks[slot].copy_(ranks, non_blocking=True)
        self.scales[slot].copy_(scales, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Make a slot touch nothing."""
        for table in (self.a_offsets, self.b_offsets, self.ranks, self.scales):
            table[slot].zero_()

    def is_clear(self, slot: int) -> bool:
        return not any(bool(table[slot].any()) for table in (self.a_offsets, self.b_offsets, self.ranks, self.scales))
