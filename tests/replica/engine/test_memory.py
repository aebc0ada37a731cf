"""Dividing a GPU's memory: the arithmetic, what is measured, and a replica's start on a device that is a fake."""

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.adapters.node_store import FolderSource
from replica.adapters.slot_tables import SlotTables
from replica.adapters.slots import SlotArena
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.errors import OutOfMemory
from replica.memory_plan import MemoryUse, asked_kv_blocks, plan_kv_blocks
from replica.memory_profile import fit_kv_blocks, full_slots, largest_steps
from replica.model.batch import ForwardBatch
from replica.model.device_runner import StepLimits
from replica.replica import Replica
from tests.fakes import PacedModel, base_spec
from tests.replica.adapters.made import SITES

GIB = 1 << 30
BLOCK = 1000
USE = MemoryUse(total=100 * BLOCK, outside=5 * BLOCK, weights=30 * BLOCK, arena=10 * BLOCK, steps=7 * BLOCK)


def config(**fields: object) -> SchedulerConfig:
    return SchedulerConfig.model_validate({"graph_reserve_bytes": 3 * BLOCK, **fields})


def test_kv_gets_what_is_left_under_the_share() -> None:
    assert plan_kv_blocks(USE, BLOCK, config()) == 90 - 5 - 30 - 10 - 7 - 3
    assert plan_kv_blocks(USE, BLOCK, config(gpu_memory_utilization=1.0)) == 45
    assert plan_kv_blocks(USE, BLOCK, config(graph_reserve_bytes=0)) == 38


def test_explicit_sizes_are_taken_when_they_fit_and_refused_with_the_numbers_when_not() -> None:
    assert plan_kv_blocks(USE, BLOCK, config(num_kv_blocks=35)) == 35
    assert plan_kv_blocks(USE, BLOCK, config(kv_bytes=20 * BLOCK + 1)) == 20
    for fields in ({"num_kv_blocks": 36}, {"kv_bytes": 36 * BLOCK}):
        with pytest.raises(OutOfMemory) as caught:
            plan_kv_blocks(USE, BLOCK, config(**fields))
        for part in ("36000 bytes", "35000 are left of 90000", "weights 30000", "arena 10000", "steps 7000", "e 3000"):
            assert part in str(caught.value)


def test_no_room_for_one_block_is_refused_whatever_is_asked() -> None:
    with pytest.raises(OutOfMemory, match="0 are left"):
        plan_kv_blocks(USE, BLOCK, config(gpu_memory_utilization=0.5))


@given(
    st.tuples(*[st.integers(0, 1000)] * 5),
    st.integers(1, 50),
    st.floats(0.01, 1.0),
    st.integers(0, 200),
    st.integers(1, 1000) | st.none(),
)
def test_what_is_planned_never_exceeds_the_share(
    parts: tuple[int, ...], block: int, share: float, reserve: int, asked: int | None
) -> None:
    use = MemoryUse(*parts)
    settings = config(gpu_memory_utilization=share, graph_reserve_bytes=reserve, num_kv_blocks=asked)
    try:
        num_blocks = plan_kv_blocks(use, block, settings)
    except OutOfMemory:
        assert sum(parts[1:]) + reserve + (asked or 1) * block > int(parts[0] * share)
    else:
        assert num_blocks == asked or asked is None
        assert sum(parts[1:]) + reserve + num_blocks * block <= parts[0] * share


def test_asked_blocks_come_from_the_number_then_the_bytes_then_the_default() -> None:
    assert asked_kv_blocks(10, config(num_kv_blocks=3, kv_bytes=100), 500) == 3
    assert asked_kv_blocks(10, config(kv_bytes=109), 500) == 10
    assert asked_kv_blocks(10, config(), 500) == 50
    assert asked_kv_blocks(10, config()) is None


@pytest.mark.parametrize(("max_batch_tokens", "max_num_seqs"), [(512, 64), (100, 7), (5, 64), (1, 1), (8192, 3)])
def test_largest_steps_use_every_token_and_every_sequence(max_batch_tokens: int, max_num_seqs: int) -> None:
    (prefill, _), (decode, is_sampled) = largest_steps(
        config(max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs)
    )
    assert is_sampled
    assert sum(span.num_tokens for span in prefill) == max_batch_tokens
    assert len(prefill) == len(decode) == min(max_num_seqs, max_batch_tokens)
    blocks = [block for span in prefill for block in span.block_table]
    assert blocks == list(range(len(blocks)))
    assert all(len(span.block_table) * 16 >= span.context_length for span in (*prefill, *decode))


class FakeDevice:
    """Counts what a fake model says that it holds."""

    total_bytes = 64 * GIB

    def __init__(self, outside: int = GIB) -> None:
        self.kept, self.transient, self.peak, self.outside = 0, 0, 0, outside

    def outside_bytes(self) -> int:
        return self.outside

    def reserved_bytes(self) -> int:
        return self.kept

    def reset_peak(self) -> None:
        self.peak = self.kept

    def peak_bytes(self) -> int:
        return self.peak

    def use(self, transient: int) -> None:
        self.peak = max(self.peak, self.kept + transient)


class GreedyModel(PacedModel):
    """Takes 16 GiB, 1 MiB a block, and 4 MiB a token and 64 MiB a slot in a step."""

    def __init__(self, device: FakeDevice, arena_bytes: int) -> None:
        super().__init__(base_spec(), sites=SITES, step_s=0.0)
        self.memory = device
        self.batches: list[ForwardBatch] = []
        self.ranks: list[list[bool]] = []
        self.limits: list[StepLimits] = []
        device.kept = 16 * GIB + arena_bytes
        self.kv_bytes = 0

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 1 << 20

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.memory.kept += (num_blocks + 1 << 20) - self.kv_bytes
        self.kv_bytes = num_blocks + 1 << 20
        self.num_blocks = num_blocks
        self.memory.use(0)

    def attach_adapters(self, memory: torch.Tensor, tables: SlotTables, max_rank: int) -> None:
        self.tables = tables

    def prepare(self, limits: StepLimits) -> None:
        self.limits.append(limits)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        self.ranks.append((self.tables.ranks > 0).any(dim=1).tolist())
        self.memory.use((len(batch.token_ids) << 22) + (len(batch.segments) << 26))
        return torch.zeros(len(batch.logit_rows), self.vocab_size)


def arena_of(num_bytes: int = 1 << 20, num_slots: int = 4) -> SlotArena:
    return SlotArena(num_slots, num_bytes, len(SITES), torch.device("cpu"), torch.float32)


def test_measured_steps_have_every_slot_in_use_and_leave_none() -> None:
    arena, device = arena_of(), FakeDevice()
    model = GreedyModel(device, arena.num_bytes)
    settings = SchedulerConfig(max_batch_tokens=512, max_num_seqs=64, graph_reserve_bytes=GIB)
    num_blocks = fit_kv_blocks(model, arena, 8, settings, device)
    steps = (512 << 22) + (4 << 26)
    left = int(64 * GIB * 0.9) - GIB - 16 * GIB - arena.num_bytes - steps - GIB
    assert num_blocks == left >> 20
    prefill, decode = model.batches
    assert (len(prefill.token_ids), len(decode.token_ids)) == (512, 64)
    assert decode.is_decode
    assert model.ranks == [[True] * 4] * 2
    for batch in model.batches:
        assert [segment.slot for segment in batch.segments] == [0, 1, 2, 3]
        assert batch.segments[0].start == 0
        assert batch.segments[-1].end == len(batch.token_ids)
        assert all(earlier.end == later.start for earlier, later in pairwise(batch.segments))
        assert {pair.a.shape[0] for segment in batch.segments for pair in segment.pairs.values()} == {8}
    assert model.limits == [StepLimits(512, 1)]
    arena.check_integrity()


def test_an_arena_too_small_for_any_adapter_is_measured_without() -> None:
    arena, device = arena_of(num_bytes=128), FakeDevice()
    model = GreedyModel(device, arena.num_bytes)
    fit_kv_blocks(model, arena, 8, SchedulerConfig(), device)
    assert all(batch.segments == () for batch in model.batches)


def test_a_full_slot_holds_the_largest_adapter_that_fits() -> None:
    arena = arena_of(num_bytes=200_000)
    with full_slots(arena, SITES, max_rank=256) as layout:
        assert 0 < layout.num_bytes <= arena.num_bytes
        ranks = {place.rank for place in layout.places}
        assert len(ranks) == 1
        assert arena.tables.ranks.unique().tolist() == list(ranks)
    with full_slots(arena_of(num_bytes=10 << 20), SITES, max_rank=12) as layout:
        assert {place.rank for place in layout.places} == {12}


def replica_on(
    device: FakeDevice, folder: Path, made: list[GreedyModel], scheduler: SchedulerConfig | None = None
) -> Replica:
    adapters = AdapterCacheConfig(node_store=folder, arena_bytes=1 << 20, host_bytes=1 << 20)

    def load(_: ModelConfig) -> GreedyModel:
        made.append(GreedyModel(device, adapters.arena_bytes))
        return made[-1]

    return Replica(
        ReplicaConfig(model=ModelConfig(base="fake"), adapters=adapters, scheduler=scheduler or SchedulerConfig()),
        FolderSource(lambda sha256: folder),
        model_loader=load,
        device_memory=lambda _: device,
    )


def test_replica_starts_with_all_that_is_left(tmp_path: Path) -> None:
    device, made = FakeDevice(), list[GreedyModel]()
    replica = replica_on(device, tmp_path, made)
    replica.load()
    assert replica.status().num_kv_blocks == made[0].num_blocks > 30_000
    assert made[0].limits == [StepLimits(512, 1), StepLimits(512, 64)]
    assert device.kept + device.outside + GIB <= 0.9 * device.total_bytes
    replica.close()


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate")


def threads_of_loads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("adapter-")}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda device, model: setattr(device, "outside", 60 * GIB), "base weights 17179869184"),
        (lambda device, model: setattr(model, "forward", out_of_memory), "max_batch_tokens 512"),
    ],
    ids=["no room", "no step"],
)
def test_a_replica_that_does_not_fit_says_why_and_leaves_nothing(
    tmp_path: Path, break_it: Callable[[FakeDevice, GreedyModel], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, made, before = FakeDevice(), list[GreedyModel](), threads_of_loads()
    replica = replica_on(device, tmp_path, made)
    loader = replica._model_loader

    def load(config: ModelConfig) -> GreedyModel:
        model = loader(config)
        break_it(device, model)  # type: ignore[arg-type]
        return model  # type: ignore[return-value]

    monkeypatch.setattr(replica, "_model_loader", load)
    with pytest.raises(OutOfMemory, match=message):
        replica.load()
    assert threads_of_loads() <= before
    replica.close()


def test_an_arena_that_the_device_cannot_hold_is_refused_by_its_name() -> None:
    with pytest.raises(OutOfMemory, match="arena_bytes"):
        arena_of(num_bytes=1 << 60)
