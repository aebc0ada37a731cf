"""What grouped kernels are told of a model and of an arena. No Triton here, so that machines without it may read it."""

from dataclasses import dataclass
from typing import Protocol

import torch


class SlotTables(Protocol):
    """Where each slot's adapter lies: device tensors [num_slots, num_sites], see `replica.adapters.slot_tables`."""

    a_offsets: torch.Tensor
    b_offsets: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One to three projections that read one input, in the order of the merged weight's rows.

    `sites` index the slot tables.
    """

    sites: tuple[int, ...]
    out_features: tuple[int, ...]
    in_features: int

    @property
    def num_out(self) -> int:
        return sum(self.out_features)
