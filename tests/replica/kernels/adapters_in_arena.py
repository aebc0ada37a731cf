"""Random adapters laid out in an arena as images are, and what they should add, in float64."""

from dataclasses import dataclass, field

import torch

from replica.adapters.slot_tables import SlotTables
from replica.adapters.weights import row_of_b
from replica.kernels.groups import GroupShape
from replica.kernels.rows import RowSegment, RowsView, num_words, pack_rows


@dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass
class Arena:
    """`ranks[slot][site]` (0: untouched) over sites of one input size; everything between tensors is poison."""

    ranks: list[list[int]]
    in_features: int
    out_features: list[int]
    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.tables = SlotTables(len(self.ranks), len(self.out_features), self.device)
        pieces, end = [], 0
        for slot, ranks in enumerate(self.ranks):
            for site, rank in enumerate(ranks):
                if not rank:
                    continue
                height, stride = self.out_features[site], row_of_b(rank)
                a = torch.randn(rank, self.in_features, generator=generator) / self.in_features**0.5
                b = torch.randn(height, rank, generator=generator)
                scale = float(torch.rand((), generator=generator)) + 0.5
                stored = torch.zeros(height, stride)
                stored[:, :rank] = b
                for tensor, offsets in ((a, self.tables.a_offsets), (stored, self.tables.b_offsets)):
                    offsets[slot, site] = end
                    flat = tensor.flatten().to(self.dtype)
                    size = -(-len(flat) // 64) * 64 + 64
                    piece = torch.full((size,), float("nan"), dtype=self.dtype)
                    piece[: len(flat)] = flat
                    pieces.append(piece)
                    end += size
                self.tables.ranks[slot, site] = rank
                self.tables.scales[slot, site] = scale
                self.pairs[slot, site] = Pair(a.to(self.dtype).double(), b.to(self.dtype).double(), scale)
        self.memory = torch.cat(pieces or [torch.zeros(64, dtype=self.dtype)]).to(self.device)

    def segments(self, lengths: list[tuple[int, int]], first: int = 0) -> list[RowSegment]:
        """Neighbouring segments (slot, rows); slot -1 leaves base-only rows between."""
        found, row = [], first
        for slot, length in lengths:
            if slot >= 0 and length:
                found.append(RowSegment(row, row + length, slot, max(self.ranks[slot])))
            row += length
        return found

    def view(self, segments: list[RowSegment], capacity: int) -> RowsView:
        return view_of(segments, capacity, self.device)

    def expected(self, x: torch.Tensor, segments: list[RowSegment], group: GroupShape) -> torch.Tensor:
        """What LoRA adds, float64 [rows, sum of out]."""
        x = x.cpu().double()
        added = torch.zeros(len(x), group.num_out, dtype=torch.float64)
        for segment in segments:
            rows, column = slice(segment.start, segment.end), 0
            for site, width in zip(group.sites, group.out_features, strict=True):
                pair = self.pairs.get((segment.slot, site))
                if pair is not None:
                    added[rows, column : column + width] = pair.scale * (x[rows] @ pair.a.T @ pair.b.T)
                column += width
        return added


def view_of(segments: list[RowSegment], capacity: int, device: torch.device) -> RowsView:
    """The rows of a step as the kernels find them."""
    words = torch.zeros(num_words(capacity), dtype=torch.int32)
    num_tiles = pack_rows(segments, capacity, words.numpy())
    max_rank = max((segment.max_rank for segment in segments), default=0)
    return RowsView(words.to(device), capacity, num_tiles, max_rank)
