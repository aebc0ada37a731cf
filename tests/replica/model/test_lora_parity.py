"""Batches of many adapters equal PEFT's own model, run one adapter at a time; base rows never change."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replica.model.base_model import BaseModel
from replica.model.batch import LoraPair
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.packed import PackedRunner, load_base, load_pairs, prompts
from tests.tiny_models import ARCHITECTURES, all_targets, load_peft, make_adapter

TOLERANCE = 1e-4


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llama(model_folder: ModelFolder) -> Path:
    return model_folder("llama")


@torch.inference_mode()
def peft_logits(folder: Path, adapter: Path, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = load_peft(folder, adapter)(torch.tensor([tokens])).logits[0]
    return logits


def run_mixed(base: BaseModel, jobs: list[tuple[list[int], dict[int, LoraPair] | None]]) -> list[torch.Tensor]:
    """Logits [len(tokens), vocab] of each job: prompts but for the last three tokens, then three decode steps."""
    runner = PackedRunner(base)
    streams = [runner.start(tokens, pairs=pairs) for tokens, pairs in jobs]
    rows: list[list[torch.Tensor]] = [[] for _ in jobs]
    for num_tokens in ([len(tokens) - 3 for tokens, _ in jobs], *([[1] * len(jobs)] * 3)):
        work = list(zip(streams, num_tokens, strict=True))
        for place, part in enumerate(runner.step(work, all_rows=True).split(num_tokens)):
            rows[place].append(part)
    return [torch.cat(parts) for parts in rows]


def targets_of(architecture: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Different targets and ranks: everything, one projection, and the rest of them."""
    names = all_targets(architecture)
    yield names, 8
    yield names[:1], 3
    yield names[1:], 24
    yield names[-1:], 1


def test_mixed_batch_of_adapters_equals_peft_one_at_a_time(
    architecture: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder(architecture)
    base = load_base(folder)
    adapters = [
        make_adapter(folder, targets, rank, folder=tmp_path / str(seed), seed=seed)
        for seed, (targets, rank) in enumerate(targets_of(architecture))
    ]
    texts = prompts([9, 14, 5, 22], seed=3)
    logits = run_mixed(base, [(text, load_pairs(base, path)) for text, path in zip(texts, adapters, strict=True)])
    for text, path, ours in zip(texts, adapters, logits, strict=True):
        assert (ours - peft_logits(folder, path, text)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj",), ("k_proj", "v_proj"), ("gate_proj",), ("up_proj",)])
def test_partial_targets_equal_peft(targets: tuple[str, ...], llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, targets, 4, folder=tmp_path)
    base = load_base(llama)
    text = prompts([12])[0]
    (ours,) = run_mixed(base, [(text, load_pairs(base, adapter))])
    assert (ours - peft_logits(llama, adapter, text)).abs().max() <= TOLERANCE


def test_ranks_that_differ_between_modules_and_layers_equal_peft(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(
        llama, ("q_proj", "up_proj"), 8, folder=tmp_path, rank_pattern={"q_proj": 3}, layers=[1], alpha=-5.5
    )
    base = load_base(llama)
    pairs = load_pairs(base, adapter)
    assert sorted(pair.a.shape[0] for pair in pairs.values()) == [3, 8]
    text = prompts([12])[0]
    (ours,) = run_mixed(base, [(text, pairs)])
    assert (ours - peft_logits(llama, adapter, text)).abs().max() <= TOLERANCE


def test_base_rows_are_bit_equal_to_a_batch_without_adapters(
    architecture: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder(architecture)
    base = load_base(folder)
    pairs = load_pairs(base, make_adapter(folder, all_targets(architecture), 8, folder=tmp_path))
    texts = prompts([9, 14, 5], seed=4)
    mixed = run_mixed(base, [(texts[0], None), (texts[1], pairs), (texts[2], None)])
    plain = run_mixed(base, [(text, None) for text in texts])
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[2], plain[2])
    assert not torch.allclose(mixed[1], plain[1], atol=0.01)


def test_base_rows_survive_a_neighbour_full_of_nan(llama: Path, tmp_path: Path) -> None:
    base = load_base(llama)
    pairs = load_pairs(base, make_adapter(llama, all_targets("llama"), 4, folder=tmp_path))
    broken = {index: LoraPair(pair.a * float("nan"), pair.b, pair.scale) for index, pair in pairs.items()}
    texts = prompts([9, 14, 8], seed=4)
    mixed = run_mixed(base, [(texts[0], None), (texts[1], broken), (texts[2], pairs)])
    plain = run_mixed(base, [(texts[0], None), (texts[1], None), (texts[2], pairs)])
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[2], plain[2])
    assert mixed[1].isnan().all()


def test_adapter_whose_b_is_zero_equals_the_base_exactly(
    architecture: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder(architecture)
    base = load_base(folder)
    zero = load_pairs(base, make_adapter(folder, all_targets(architecture), 8, folder=tmp_path, zero_b=True))
    text = prompts([12])[0]
    assert torch.equal(run_mixed(base, [(text, zero)])[0], run_mixed(base, [(text, None)])[0])


def test_step_after_a_failed_forward_uses_no_stale_segments(llama: Path, tmp_path: Path) -> None:
    base = load_base(llama)
    pairs = load_pairs(base, make_adapter(llama, all_targets("llama"), 4, folder=tmp_path))
    bad = {0: LoraPair(pairs[0].a[:, :-1], pairs[0].b, 1.0)}
    text = prompts([6])[0]
    with pytest.raises(RuntimeError):
        run_mixed(base, [(text, bad)])
    runner = PackedRunner(base)
    after = runner.step([(runner.start(text), len(text))])
    runner = PackedRunner(base)
    assert torch.equal(after, runner.step([(runner.start(text, pairs=pairs), len(text))], lora=False))


def test_bfloat16_base_with_fp32_pairs_adds_in_fp32(llama: Path, tmp_path: Path) -> None:
    base = load_base(llama, dtype="bfloat16")
    pairs = load_pairs(base, make_adapter(llama, all_targets("llama"), 4, folder=tmp_path))
    assert {pair.a.dtype for pair in pairs.values()} == {torch.bfloat16}
    wide = {index: LoraPair(pair.a.float(), pair.b.float(), pair.scale) for index, pair in pairs.items()}
    text = prompts([12])[0]
    narrow_logits, wide_logits = (run_mixed(base, [(text, chosen)])[0] for chosen in (pairs, wide))
    full = load_base(llama)
    exact = run_mixed(full, [(text, load_pairs(full, tmp_path))])[0]
    assert (narrow_logits - exact).abs().max() < 0.2
    assert (wide_logits - exact).abs().max() < 0.2


def test_one_adapter_over_prefill_and_decode_rows_in_one_segment_equals_peft(llama: Path, tmp_path: Path) -> None:
    base = load_base(llama)
    adapter = make_adapter(llama, all_targets("llama"), 8, folder=tmp_path)
    pairs = load_pairs(base, adapter)
    runner = PackedRunner(base)
    texts = prompts([10, 13], seed=5)
    early, late = (runner.start(text, pairs=pairs) for text in texts)
    runner.step([(early, 9)])
    decode, prefill = runner.step([(early, 1), (late, 13)])
    for text, row in zip(texts, (decode, prefill), strict=True):
        assert (row - peft_logits(llama, adapter, text)[-1]).abs().max() <= TOLERANCE
