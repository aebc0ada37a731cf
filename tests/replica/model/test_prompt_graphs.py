"""Steps with prompts, recorded in pieces: which there are, where they are cut, and that they compute what others do."""

import sys
import weakref
from pathlib import Path

import pytest
import torch

from replica.model.batch import ForwardBatch, LoraSegment, SequenceSpan
from replica.model.cuda_graphs import Cut, DirectRecorder, Pieces
from replica.model.flashinfer_attention import FlashInferAttention
from replica.model.paged_attention import LayerShape, ScoreRule
from replica.model.prompt_graphs import PromptGraphs, Seams, row_buckets
from replica.model.step_attention import LayerHeads
from tests.replica.model import fake_flashinfer
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.on_device import DeviceBase, differs, packed
from tests.replica.model.packed import PackedRunner, load_base, load_pairs, prompts
from tests.tiny_models import all_targets, make_adapter

TOLERANCE = 1e-4
RULE = ScoreRule(0.5, None, None)
HEADS = LayerHeads(LayerShape(1, 2, 3), 2, RULE)


class TwiceTheQueries:
    """Attention whose answer shows which queries it saw."""

    def __init__(self) -> None:
        self.layers: tuple[LayerHeads, ...] = (HEADS, HEADS)
        self.written: list[tuple[int, list[int]]] = []

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        self.written.append((layer, slots.tolist()))

    def read_layer(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(2 * q.sum(-1, keepdim=True).expand_as(out))


class CountingRecorder(DirectRecorder):
    """Notes how many steps are recorded; runs them directly."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record_pieces(self, run: Pieces) -> Pieces:
        self.num_recorded += 1
        return run


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(1, ()), (2, (2,)), (32, (32,)), (70, (32, 64, 70)), (8192, (32, 64, 96, 128, 192, 256, 384, 512, 768))],
)
def test_buckets_rise_up_to_the_largest_step(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert row_buckets(max_rows)[: len(sizes)] == sizes
    assert max(row_buckets(max_rows), default=0) <= min(max_rows, 2048)


def test_a_layer_writes_first_and_answers_at_the_cut() -> None:
    attention = TwiceTheQueries()
    seams = Seams(attention, attention.layers, torch.tensor([4, 5, -1, -1]), torch.float32)
    cuts: list[int] = []
    q = torch.arange(12.0).reshape(3, 2, 2)
    with seams.cut_by(cuts.append):
        answers = seams.attend_layer(1, q, torch.zeros(3, 1, 2), torch.zeros(3, 1, 3), RULE)
    assert (attention.written, cuts) == ([(1, [4, 5, -1])], [1])
    assert bool((answers == 0).all())
    seams.attend(1, num_rows=2)
    assert bool((answers[:2] == 2 * q[:2].sum(-1, keepdim=True)).all())
    assert bool((answers[2] == 0).all())


def test_a_replay_attends_for_the_real_rows_at_each_cut() -> None:
    attention = TwiceTheQueries()
    seams = Seams(attention, attention.layers, torch.full((8,), -1), torch.float32)
    seen: list[tuple[int, int, torch.Tensor]] = []

    def run(bucket: int, room: int, seams: Seams) -> None:
        q = torch.ones(bucket, 2, 2)
        k, v = torch.zeros(bucket, 1, 2), torch.zeros(bucket, 1, 3)
        for layer in range(2):
            answers = seams.attend_layer(layer, q, k, v, RULE).clone()
            seen.append((layer, room, answers))

    recorder, planned = CountingRecorder(), list[int]()
    graphs = PromptGraphs((4, 8), (0, 16), recorder, run, seams)
    graphs.record_all(planned.append)
    assert planned == [8, 8, 4, 4]
    assert (recorder.num_recorded, len(graphs)) == (4, 4)
    assert [graphs.bucket(rows) for rows in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, None]
    graphs.replay(4, 16, num_rows=3)
    assert [(layer, room) for layer, room, _ in seen] == [(0, 16), (1, 16)]
    for _, _, answers in seen:
        assert answers[:, 0, 0].tolist() == [4, 4, 4, 0]


@pytest.fixture
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "Event", fake_flashinfer.Event)
    monkeypatch.setattr("replica.model.flashinfer_attention.WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(
        "replica.model.base_model.attention_over", lambda cache, layers, config: FlashInferAttention(cache, layers)
    )


def rooms_replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rooms of the recorded prompts that will be replayed from now on."""
    rooms, replay = list[int](), PromptGraphs.replay

    def noting(self: PromptGraphs, bucket: int, room: int, num_rows: int) -> None:
        rooms.append(room)
        replay(self, bucket, room, num_rows)

    monkeypatch.setattr(PromptGraphs, "replay", noting)
    return rooms


@pytest.mark.usefixtures("_flashinfer")
@pytest.mark.parametrize("sums", [False, True], ids=["beside", "summed"])
@pytest.mark.parametrize(("ranks", "room"), [((8, 3), 16), ((8, 24), 64)], ids=["small ranks", "a larger one"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_prompts_with_adapters_equal_the_plain_path(
    architecture: str,
    ranks: tuple[int, int],
    room: int,
    sums: bool,
    model_folder: ModelFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last logits only, which is what the recorded steps compute; in both forms of LoRA."""
    if sums:
        monkeypatch.setattr("replica.model.step_state.MAX_DECODE_ROWS", 8)
    folder = model_folder(architecture)
    plain, device = load_base(folder), DeviceBase(folder)
    rooms = rooms_replayed(monkeypatch)
    adapters = [
        make_adapter(folder, all_targets(architecture), rank, folder=tmp_path / str(rank), seed=rank) for rank in ranks
    ]
    pairs = [None, *(load_pairs(plain, path) for path in adapters)]
    texts = prompts([9, 14, 5], seed=3)
    found = []
    for runner in (packed(device), PackedRunner(plain)):
        streams = [runner.start(text, pairs=chosen) for text, chosen in zip(texts, pairs, strict=True)]
        found.append(runner.step([(stream, len(stream.tokens)) for stream in streams]))
    assert device.runner._prompt_graphs is not None
    assert device.runner._prompt_graphs.bucket(28) == 32
    assert rooms == [room]
    assert differs(*found) <= TOLERANCE


def test_a_step_in_pieces_calls_what_it_is_given() -> None:
    calls: list[int] = []

    def run(cut: Cut) -> None:
        cut(7)

    DirectRecorder().record_pieces(run)(calls.append)
    assert calls == [7]


@pytest.mark.usefixtures("_flashinfer")
def test_a_new_cache_leaves_nothing_that_knows_the_old_one(model_folder: ModelFolder) -> None:
    device = DeviceBase(model_folder("llama"))
    device.allocate_kv(16, 4)
    assert device.base._cache is not None
    old = weakref.ref(device.base._cache)
    device.runner.release()
    device.base._cache = None
    assert old() is None


@pytest.mark.usefixtures("_flashinfer")
def test_a_step_of_more_adapters_than_sequences_is_launched_as_it_is(model_folder: ModelFolder) -> None:
    device = DeviceBase(model_folder("llama"))
    device.allocate_kv(16, 4)
    most = device.limits.max_sequences

    def step(num_segments: int) -> ForwardBatch:
        return ForwardBatch(
            token_ids=torch.zeros(30, dtype=torch.int64),
            positions=torch.arange(30),
            spans=(SequenceSpan(30, 30, tuple(range(8))),),
            logit_rows=torch.tensor([29]),
            segments=tuple(LoraSegment(row, row + 1, 0, {}) for row in range(num_segments)),
        )

    assert device.runner._prompt_bucket(step(most)) == 32
    assert device.runner._prompt_bucket(step(most + 1)) is None
