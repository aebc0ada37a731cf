"""On a GPU: recorded steps equal the same kernels without a recording, and the plain path within a tolerance."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replica.model.batch import LoraPair
from tests.gpu.rig import BIG_HEADS, GpuBase, distance, forced, greedy, packed, relative
from tests.replica.model.packed import PackedRunner, load_base, prompts
from tests.tiny_models import ARCHITECTURES, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BF16_TOLERANCE = 1.5
"""How many times as far from float32 as plain bf16 the recorded steps may be, root mean square over all logits."""

Folders = Callable[..., Path]
Pairs = list[Mapping[int, LoraPair] | None]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    made: dict[str, Path] = {}

    def make(architecture: str, **overrides: object) -> Path:
        key = f"{architecture}{sorted(overrides.items())}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(architecture), architecture, **overrides)
            round_weights(made[key])
        return made[key]

    return make


def round_weights(folder: Path) -> None:
    """Weights that bf16 holds exactly, so that bases of both dtypes are the same."""
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def mixed(base: GpuBase, count: int) -> Pairs:
    """Every third stream base-only, then adapters in order, so that neighbours share a slot."""
    num_adapters = len(base.adapters.leases)
    chosen = sorted(index % (num_adapters + 1) for index in range(count))
    return [None if index == 0 else base.pairs(index - 1) for index in chosen]


def test_512_tokens_of_32_streams_with_5_adapters_are_the_same_without_graphs(folder_of: Folders) -> None:
    folder = folder_of("llama", max_position_embeddings=1024, **BIG_HEADS)
    texts = prompts([5 + index % 17 for index in range(32)], seed=2)
    outputs, logits = [], []
    for cuda_graphs in ("auto", "off"):
        base = GpuBase(folder, num_adapters=5, cuda_graphs=cuda_graphs)
        runner = packed(base)
        assert (base.report.num_graphs > 0) == (cuda_graphs == "auto")
        tokens, seen = greedy(runner, texts, 512, mixed(base, 32))
        outputs.append(tokens)
        logits.append(seen)
    assert outputs[0] == outputs[1], f"logits differ by up to {(logits[0] - logits[1]).abs().max()}"


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", BIG_HEADS),
        ("qwen2", BIG_HEADS),
        ("qwen3", BIG_HEADS),
        ("mistral", BIG_HEADS),
        ("gemma2", BIG_HEADS),
        ("gemma3", BIG_HEADS),
        ("phi3", BIG_HEADS),
        ("gpt2", {"n_embd": 256, "n_head": 4}),
    ],
)
def test_flashinfer_and_graphs_agree_with_plain_attention(
    architecture: str, overrides: dict[str, int], folder_of: Folders
) -> None:
    folder = folder_of(architecture, **overrides)
    texts = prompts([4, 9, 23, 40, 41], seed=3)
    recorded = GpuBase(folder, num_adapters=3)
    runner = packed(recorded)
    assert recorded.report.num_graphs > 0
    tokens, logits = greedy(runner, texts, 24, mixed(recorded, 5))
    errors = {}
    exact = forced_plainly(recorded, folder, texts, tokens, dtype="float32")
    errors["recorded"] = distance(logits, exact)
    errors["plain"] = distance(forced_plainly(recorded, folder, texts, tokens), exact)
    assert errors["recorded"] <= BF16_TOLERANCE * errors["plain"], errors


def forced_plainly(
    recorded: GpuBase, folder: Path, texts: list[list[int]], tokens: list[list[int]], **fields: object
) -> torch.Tensor:
    """The logits of the same steps with the same adapters, launched one operation at a time."""
    plain = GpuBase(folder, num_adapters=3, attention="torch", compile="off", cuda_graphs="off", **fields)
    with torch.inference_mode():
        plain.adapters.arena.memory.copy_(recorded.adapters.arena.memory)
    return forced(packed(plain), texts, tokens, mixed(plain, len(texts)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_fp32_models_choose_the_tokens_of_the_cpu(architecture: str, folder_of: Folders) -> None:
    folder = folder_of(architecture)
    texts = prompts([4, 9, 23], seed=4)
    none: Pairs = [None] * 3
    ours, _ = greedy(packed(GpuBase(folder, dtype="float32")), texts, 32, none)
    theirs, _ = greedy(PackedRunner(load_base(folder)), texts, 32, none)
    assert ours == theirs


def test_fp32_adapters_equal_the_cpu(folder_of: Folders) -> None:
    folder = folder_of("llama")
    texts = prompts([4, 9, 23, 11], seed=5)
    gpu = GpuBase(folder, num_adapters=3, dtype="float32")
    on_cpu = [
        None if pairs is None else {site: _to_cpu(pair) for site, pair in pairs.items()} for pairs in mixed(gpu, 4)
    ]
    tokens, logits = greedy(packed(gpu), texts, 16, mixed(gpu, 4))
    again = forced(PackedRunner(load_base(folder)), texts, tokens, on_cpu)
    assert (logits - again).abs().max() <= 1e-3


def _to_cpu(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.a.cpu(), pair.b.cpu(), pair.scale)


def test_base_rows_do_not_change_beside_adapters(folder_of: Folders) -> None:
    base = GpuBase(folder_of("llama", **BIG_HEADS), num_adapters=2)
    runner = packed(base)
    texts = prompts([9, 9, 9], seed=6)
    alone: Pairs = [None, None, None]
    beside: Pairs = [None, base.pairs(0), base.pairs(1)]
    tokens, logits = greedy(runner, texts, 8, alone)
    again = forced(runner, texts, tokens, beside)
    assert relative(again[:, 0], logits[:, 0]) <= 0.05
    assert relative(again[:, 1], logits[:, 1]) > 0.05


def test_a_replay_allocates_nothing(folder_of: Folders) -> None:
    base = GpuBase(folder_of("llama", **BIG_HEADS), num_adapters=1)
    runner = packed(base)
    streams = [runner.start(text, 8) for text in prompts([9, 9])]
    runner.step([(stream, 8) for stream in streams])
    runner.step([(stream, 1) for stream in streams])
    before = torch.cuda.memory_allocated()
    base.base.replay(2, max_rank=0)
    base.base.replay(2, max_rank=64)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_tokens_that_are_on_the_device_are_taken_from_there(folder_of: Folders) -> None:
    from dataclasses import replace

    base = GpuBase(folder_of("llama", **BIG_HEADS))
    runner = packed(base)
    seen = []
    forward = base.forward
    for device in ("cpu", "cuda"):
        base.forward = lambda batch, device=device: forward(  # type: ignore[method-assign]
            replace(batch, token_ids=batch.token_ids.to(device), logit_rows=batch.logit_rows.to(device))
        )
        seen.append(greedy(runner, prompts([5, 12], seed=8), 12, [None, None])[0])
    assert seen[0] == seen[1]
