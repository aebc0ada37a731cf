"""The arena: true views, nothing left of earlier owners, and compaction that changes no weight."""

import pytest
import torch

from replica.adapters.copier import SlotCopier
from replica.adapters.image_reader import ImageReader
from replica.adapters.slots import SlotArena, SlotState
from replica.adapters.weights import AdapterImage, row_of_b
from tests.replica.adapters.made import QV, SITES, Made, assert_holds, layout_of, make_adapter


@pytest.fixture
def image_of(tmp_path):
    def build(made: Made) -> AdapterImage:
        path = tmp_path / made.digest
        path.write_bytes(made.blob)
        return ImageReader().read(path, made.manifest, layout_of(made, torch.float32))

    return build


def make_arena(num_bytes: int, num_slots: int = 8) -> SlotArena:
    return SlotArena(num_slots, num_bytes, len(SITES), torch.device("cpu"), torch.float32)


def put(arena: SlotArena, image: AdapterImage) -> int:
    slot = arena.allocate(image.layout)
    assert slot is not None
    arena.publish(slot, SlotCopier(arena.memory).copy(image, arena.start(slot), None))
    arena.check_integrity()
    return slot


def assert_tables_describe(arena: SlotArena, slot: int, made: Made) -> None:
    """The tables alone give the adapter's weights, and touch no other site."""
    tables = arena.tables
    by_path = {module.path: module for module in made.manifest.modules}
    for site in SITES:
        rank = int(tables.ranks[slot, site.index])
        if site.path not in by_path:
            assert rank == 0
            continue
        module = by_path[site.path]
        assert rank == module.rank
        for offsets, key in ((tables.a_offsets, module.a.key), (tables.b_offsets, module.b.key)):
            start = int(offsets[slot, site.index])
            true = made.tensors[key]
            row = row_of_b(rank) if key == module.b.key else true.shape[1]
            found = arena.memory[start : start + len(true) * row].view(len(true), row)
            assert torch.equal(found[:, : true.shape[1]], true)
            assert not found[:, true.shape[1] :].any()
        assert float(tables.scales[slot, site.index]) == pytest.approx(module.scale, rel=1e-7)


def test_budget_of_exactly_one_adapter_holds_it(image_of) -> None:
    made = make_adapter(1)
    image = image_of(made)
    arena = make_arena(image.num_bytes)
    slot = put(arena, image)
    assert arena.free_bytes == 0
    assert_holds(arena.pairs(slot), made)
    assert arena.allocate(image.layout) is None
    assert make_arena(image.num_bytes - 1).allocate(image.layout) is None


def test_slots_run_out_before_bytes_do(image_of) -> None:
    image = image_of(make_adapter(1))
    arena = make_arena(10 * image.num_bytes, num_slots=2)
    put(arena, image)
    put(arena, image)
    assert arena.allocate(image.layout) is None


@pytest.mark.parametrize("ranks", [(64, 8, 64), (8, 64, 8), (1, 3, 24)])
def test_other_ranks_in_the_same_place_read_right(image_of, ranks: tuple[int, ...]) -> None:
    images = [(made, image_of(made)) for made in (make_adapter(seed, rank=rank) for seed, rank in enumerate(ranks))]
    arena = make_arena(max(image.num_bytes for _, image in images), num_slots=1)
    for made, image in images:
        slot = put(arena, image)
        assert_holds(arena.pairs(slot), made)
        assert_tables_describe(arena, slot, made)
        arena.free(slot)


def test_reused_slot_keeps_nothing_of_its_last_owner(image_of) -> None:
    arena = make_arena(image_of(make_adapter(1)).num_bytes, num_slots=1)
    arena.free(put(arena, image_of(make_adapter(1))))
    assert arena.tables.is_clear(0)
    with pytest.raises(AssertionError):
        arena.pairs(0)
    few = make_adapter(2, targets=QV)
    slot = put(arena, image_of(few))
    assert_holds(arena.pairs(slot), few)
    assert_tables_describe(arena, slot, few)


def test_compaction_moves_images_unchanged(image_of) -> None:
    adapters = [make_adapter(seed, rank=rank) for seed, rank in enumerate((4, 16, 4, 8, 4))]
    images = [image_of(made) for made in adapters]
    arena = make_arena(sum(image.num_bytes for image in images))
    slots = [put(arena, image) for image in images]
    for index in (0, 2, 4):
        arena.free(slots[index])
    before = arena.pairs(slots[3])
    need = images[0].num_bytes * 3
    assert arena.compact(need) > 0
    arena.check_integrity()
    assert arena.pairs(slots[3]) is not before
    for index in (1, 3):
        assert_holds(arena.pairs(slots[index]), adapters[index])
        assert_tables_describe(arena, slots[index], adapters[index])
    big = make_adapter(9, rank=12)
    assert_holds(arena.pairs(put(arena, image_of(big))), big)


def test_overlapping_move_larger_than_the_bounce_buffer_is_exact(image_of, monkeypatch) -> None:
    monkeypatch.setattr("replica.adapters.slots._BOUNCE_ELEMENTS", 100)
    small, large = make_adapter(1, rank=1, targets=QV), make_adapter(2, rank=16)
    arena = make_arena(image_of(small).num_bytes + image_of(large).num_bytes)
    first, second = put(arena, image_of(small)), put(arena, image_of(large))
    arena.free(first)
    arena.memory[: arena.start(second)] = float("nan")
    assert arena.compact(0) == 0
    moves = arena._extents.plan_moves(arena.free_bytes // 4, fixed={second})
    assert moves == []
    arena._move(arena._extents._push_down([second], 0)[0])
    assert_holds(arena.pairs(second), large)


def test_loading_slot_is_not_moved(image_of) -> None:
    image = image_of(make_adapter(1))
    arena = make_arena(4 * image.num_bytes)
    slots = [put(arena, image), arena.allocate(image.layout), put(arena, image)]
    put(arena, image)
    arena.free(slots[0])
    arena.free(slots[2])
    assert arena.state(1) is SlotState.LOADING
    assert arena.compact(2 * image.num_bytes) == 0
    assert arena.start(1) == image.layout.num_elements
