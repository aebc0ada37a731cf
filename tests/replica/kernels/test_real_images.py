"""The kernels over images as the cache makes them: read from a file, in a slot of the arena, of any rank."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from replica.adapters.image_reader import ImageReader
from replica.adapters.slots import SlotArena
from replica.adapters.weights import plan_layout, view_pairs
from replica.kernels.groups import GroupShape
from replica.kernels.rows import RowSegment
from tests.replica.adapters.made import HIDDEN, INNER, KV, SITES, make_adapter
from tests.replica.kernels.adapters_in_arena import view_of
from tests.replica.kernels.test_grouped_lora import DEVICE, TOLERANCE, delta_of, distance, random

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

BY_PATH = {site.path: site for site in SITES}
GROUPS = {
    "qkv": GroupShape((0, 1, 2), (HIDDEN, KV, KV), HIDDEN),
    "gate_up": GroupShape((4, 5), (INNER, INNER), HIDDEN),
    "down": GroupShape((6,), (HIDDEN,), INNER),
}
RANKS = (8, 4, 1, 12, 20, 3)
ROWS_EACH = 2


def filled_arena(folder: Path) -> SlotArena:
    """Each slot with an adapter of its own rank, one behind the other."""
    arena = SlotArena(len(RANKS), 1 << 20, len(SITES), DEVICE, torch.float32)
    for seed, rank in enumerate(RANKS):
        made = make_adapter(seed, rank=rank)
        path, layout = folder / made.digest, plan_layout(made.manifest, BY_PATH, torch.float32)
        path.write_bytes(made.blob)
        image, slot = ImageReader().read(path, made.manifest, layout), arena.allocate(layout)
        assert slot == seed
        start = arena.start(slot)
        arena.memory[start : start + layout.num_elements].copy_(image.data)
        arena.publish(slot, view_pairs(arena.memory, start, layout))
    return arena


@pytest.mark.parametrize("capacity", [16, 600], ids=["decode", "prompt"])
@pytest.mark.parametrize("name", GROUPS)
def test_delta_is_that_of_the_image_whatever_the_rank(tmp_path: Path, name: str, capacity: int) -> None:
    arena, group = filled_arena(tmp_path), GROUPS[name]
    segments = [RowSegment(slot * ROWS_EACH, (slot + 1) * ROWS_EACH, slot, rank) for slot, rank in enumerate(RANKS)]
    x = random(capacity, group.in_features, dtype=torch.float32)
    found = delta_of(arena, x, group, view_of(segments, capacity, DEVICE))
    for segment, rank in zip(segments, RANKS, strict=True):
        rows = slice(segment.start, segment.end)
        pairs = [arena.pairs(segment.slot)[site] for site in group.sites]
        a_x = [pair.scale * (x[rows].double() @ pair.a.double().T) for pair in pairs]
        expected = torch.cat([t @ pair.b.double().T for t, pair in zip(a_x, pairs, strict=True)], dim=1)
        assert distance(found[rows], expected.cpu()) < TOLERANCE[torch.float32], f"rank {rank}"
