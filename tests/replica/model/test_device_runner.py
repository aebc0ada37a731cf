"""The path for GPUs gives what the plain one gives: merged projections, padded steps, adapters on any subset."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from replica.kernels.rows import MAX_DECODE_ROWS, RowsView
from replica.kernels.tuning import product_config, shrink_config
from replica.model.base_model import BaseModel
from replica.model.batch import LoraPair
from replica.model.device_runner import Adapters, StepLimits, product_sizes
from replica.model.paged_attention import KVCache
from replica.model.projections import GroupFollower, GroupLeader, Stash
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.on_device import DeviceBase, FakeKernels, differs, packed
from tests.replica.model.packed import PackedRunner, load_base, load_pairs, prompts
from tests.tiny_models import ARCHITECTURES, all_targets, make_adapter

TOLERANCE = 1e-4
Jobs = list[tuple[list[int], dict[int, LoraPair] | None]]


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(runner: PackedRunner, jobs: Jobs, num_decodes: int = 3) -> torch.Tensor:
    """Logits of all rows: prompts but for their last tokens, then those one by one."""
    streams = [runner.start(tokens, pairs=pairs) for tokens, pairs in jobs]
    work = [(stream, len(stream.tokens) - num_decodes) for stream in streams]
    parts = [runner.step(work, all_rows=True)]
    parts += [runner.step([(stream, 1) for stream in streams]) for _ in range(num_decodes)]
    return torch.cat(parts)


def mixed_jobs(base: BaseModel, folder: Path, architecture: str, tmp_path: Path) -> Jobs:
    """A base-only prompt, then prompts with all targets, with the first one only, and with the others."""
    names = all_targets(architecture)
    targets = (names, names[:1], names[1:])
    adapters = [
        make_adapter(folder, chosen, rank, folder=tmp_path / str(rank), seed=rank)
        for chosen, rank in zip(targets, (8, 3, 24), strict=True)
    ]
    texts = prompts([9, 14, 5, 22], seed=3)
    return list(zip(texts, [None, *(load_pairs(base, path) for path in adapters)], strict=True))


def test_logits_equal_the_plain_path(architecture: str, model_folder: ModelFolder) -> None:
    folder = model_folder(architecture)
    jobs: Jobs = [(text, None) for text in prompts([4, 17, 30], seed=1)]
    assert differs(run(packed(DeviceBase(folder)), jobs), run(PackedRunner(load_base(folder)), jobs)) <= TOLERANCE


def test_adapters_on_different_targets_equal_the_plain_path(
    architecture: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder(architecture)
    plain, device = load_base(folder), DeviceBase(folder)
    jobs = mixed_jobs(plain, folder, architecture, tmp_path)
    assert differs(run(packed(device), jobs), run(PackedRunner(plain), jobs)) <= TOLERANCE
    assert device.kernels.num_calls > 0


def test_more_sequences_than_the_largest_bucket_run_too(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    jobs: Jobs = [(text, None) for text in prompts([6] * 15, seed=1)]
    assert differs(run(packed(DeviceBase(folder)), jobs), run(PackedRunner(load_base(folder)), jobs)) <= TOLERANCE


@pytest.mark.parametrize("length", [1, 2])
def test_a_step_of_one_row_equals_the_plain_path(length: int, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    device, plain = packed(DeviceBase(folder)), PackedRunner(load_base(folder))
    text = prompts([length])[0]
    ours, theirs = (runner.step([(runner.start(text), length)]) for runner in (device, plain))
    assert differs(ours, theirs) <= TOLERANCE


def test_padding_rows_leave_the_cache_as_it_is(model_folder: ModelFolder) -> None:
    device = DeviceBase(model_folder("llama"))
    runner = packed(device)
    streams = [runner.start(text) for text in prompts([5, 6, 7])]
    runner.step([(stream, len(stream.tokens) - 1) for stream in streams])
    assert device.base._cache is not None
    before = [tensor.clone() for tensor in device.base._cache.keys]
    runner.step([(stream, 1) for stream in streams])
    changed = [(old != new).any(dim=(1, 2)) for old, new in zip(before, device.base._cache.keys, strict=True)]
    spare = slice(-device.base._cache.block_size, None)
    for rows in changed:
        rows[spare] = False
        assert int(rows.sum()) == len(streams)


def test_siblings_share_one_weight_and_nothing_is_kept_twice(model_folder: ModelFolder) -> None:
    base = DeviceBase(model_folder("qwen2")).base
    attention = base._model.get_submodule("model.layers.0.self_attn")
    leader, follower = attention.q_proj, attention.v_proj
    assert isinstance(leader, GroupLeader)
    assert isinstance(follower, GroupFollower)
    assert leader.weight.shape[0] == 32 + 16 + 16
    for module in (leader.base_layer, follower.base_layer):
        assert module.weight.untyped_storage().data_ptr() == leader.weight.untyped_storage().data_ptr()
        assert module.bias.untyped_storage().data_ptr() == leader.bias.untyped_storage().data_ptr()


def test_a_group_called_out_of_turn_is_an_error() -> None:
    follower = GroupFollower(nn.Linear(4, 4), Stash(), 0, 4, is_last=True)
    with pytest.raises(AssertionError, match="out of turn"):
        follower(torch.zeros(1, 4))


def test_two_models_in_one_process_do_not_meet(model_folder: ModelFolder) -> None:
    jobs: Jobs = [(text, None) for text in prompts([4, 17], seed=1)]
    names = ("llama", "qwen2")
    runners = [packed(DeviceBase(model_folder(name))) for name in names]
    for name, runner in zip(names, runners, strict=True):
        assert differs(run(runner, jobs), run(PackedRunner(load_base(model_folder(name))), jobs)) <= TOLERANCE


def test_host_times_count_the_steps(model_folder: ModelFolder) -> None:
    device = DeviceBase(model_folder("llama"))
    run(packed(device), [(text, None) for text in prompts([6])])
    assert device.runner.times.num_steps == 4
    assert device.runner.times.pack_s > 0


def test_a_new_cache_takes_the_place_of_the_old_one(model_folder: ModelFolder) -> None:
    base = DeviceBase(model_folder("llama"))
    base.allocate_kv(16, 4)
    assert base.base._cache is not None
    old = weakref.ref(base.base._cache)
    held_at_allocation: list[bool] = []

    class Watched(KVCache):
        def __init__(self, *arguments: object) -> None:
            held_at_allocation.append(old() is not None)
            super().__init__(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replica.model.base_model.KVCache", Watched)
        base.allocate_kv(16, 4)
    assert held_at_allocation == [False]


def test_sequences_that_share_blocks_may_name_more_pages_than_there_are(model_folder: ModelFolder) -> None:
    """Forks of one prompt hold the same blocks."""
    runner = packed(DeviceBase(model_folder("llama")))
    streams = [runner.start(text) for text in prompts([24] * 8)]
    for stream in streams:
        stream.blocks = streams[0].blocks
    whole = runner.step([(streams[0], 23)])
    for stream in streams:
        stream.cached = 23
    small = DeviceBase(model_folder("llama"))
    small.allocate_kv(7, 4)
    assert small.runner._decode_buffers.views["pages"].shape[0] >= 8 * 6
    assert runner.step([(stream, 1) for stream in streams]).shape[0] == 8
    assert whole.isfinite().all()


Kind = tuple[bool, int, int, tuple[int, ...]]


class NotingKernels(FakeKernels):
    """Notes which kernels would be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[Kind] = set()

    def bind(self, rows: RowsView) -> RowsView:
        self.kinds.add(kind_of(rows))
        return super().bind(rows)


def kind_of(rows: RowsView) -> Kind:
    """The kind of step, the largest form and the block of ranks, and the parts of K of one to three projections."""
    splits = (shrink_config(rows, count, 4096, num_processors=132).splits for count in (1, 2, 3))
    return rows.is_decode, rows.most_form, rows.rank_block, tuple(splits)


@pytest.mark.parametrize("max_rows", [96, MAX_DECODE_ROWS + 1, 1600])
@pytest.mark.parametrize("max_rank", [1, 8, 12, 100, 256])
def test_kernels_for_every_rank_that_may_come_are_compiled_at_start(
    max_rank: int, max_rows: int, model_folder: ModelFolder
) -> None:
    device = DeviceBase(model_folder("llama"), StepLimits(max_rows, max_sequences=4))
    kernels = NotingKernels()
    device.runner.use_adapters(Adapters(kernels, max_rank))
    device.allocate_kv(16, 4)
    ranks, capacities = range(1, max_rank + 1), range(2, max_rows + 1)
    views = [RowsView(torch.empty(0), capacity, 1, rank) for rank in ranks for capacity in capacities]
    assert kernels.kinds == {kind_of(rows) for rows in views}


class RoomyKernels(FakeKernels):
    """Remembers the room for ranks of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[int] = []

    def bind(self, rows: RowsView) -> RowsView:
        self.rooms.append(rows.max_rank)
        return super().bind(rows)


def test_a_recorded_step_has_room_for_small_ranks_unless_one_of_its_own_is_larger(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    plain, device = load_base(folder), DeviceBase(folder)
    device.kernels = RoomyKernels()
    device.runner.use_adapters(Adapters(device.kernels, max_rank=64))
    jobs = mixed_jobs(plain, folder, "llama", tmp_path)
    rooms = []
    for chosen in (jobs[:3], jobs):
        run(packed(device), chosen)
        rooms.append(device.kernels.rooms[-3:])
    assert rooms == [[16] * 3, [64] * 3]


@pytest.mark.parametrize("max_rows", [2, 32, 40, 48, 112, 128, 8192])
@pytest.mark.parametrize(("num_out", "in_features"), [(4096, 4096), (6144, 4096), (28672, 4096)])
def test_the_product_of_any_number_of_rows_is_compiled_at_start(num_out: int, in_features: int, max_rows: int) -> None:
    """On an H200, which has 132 multiprocessors. Triton compiles for multiples of 16 apart; no step has one row."""

    def compiled(num_rows: int) -> tuple[object, ...]:
        cut = product_config(num_rows, num_out, in_features, 132)
        return cut, cut is not None and (num_rows == cut.block_m + cut.more, num_rows % 16 == 0)

    sizes = [*product_sizes(max_rows), max_rows]
    assert {compiled(rows) for rows in range(2, max_rows + 1)} <= {compiled(size) for size in sizes}
