"""What FlashInfer is told, step by step: plans, pages and rules, checked with its wrappers in plain torch."""

import sys

import pytest
import torch

from replica.model.base_model import BaseModel
from replica.model.flashinfer_attention import FlashInferAttention, why_not
from replica.model.paged_attention import LayerShape, ScoreRule
from replica.model.step_attention import LayerHeads
from tests.replica.model import fake_flashinfer
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.on_device import DeviceBase, differs, packed
from tests.replica.model.packed import PackedRunner, load_base, prompts
from tests.tiny_models import ARCHITECTURES

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "Event", fake_flashinfer.Event)
    monkeypatch.setattr("replica.model.flashinfer_attention.WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(
        "replica.model.base_model.attention_over", lambda cache, layers, config: FlashInferAttention(cache, layers)
    )


def attention_of(base: BaseModel) -> FlashInferAttention:
    attention = base._runner._attention  # type: ignore[union-attr]
    assert isinstance(attention, FlashInferAttention)
    return attention


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_chunks_and_decodes_equal_the_plain_path(architecture: str, model_folder: ModelFolder) -> None:
    folder = model_folder(architecture)
    device, plain = packed(DeviceBase(folder)), PackedRunner(load_base(folder))
    texts = prompts([5, 30, 17, 9], seed=6)
    counts = ([3, 20, 17, 8], [1, 9, 0, 1], [1, 1, 0, 0])
    streams = [(device.start(text), plain.start(text)) for text in texts]
    for step in counts:
        for both in streams:
            if both[0].cached == len(both[0].tokens):
                for stream in both:
                    stream.tokens.append(7)
                    stream.blocks = (*stream.blocks, (device if stream is both[0] else plain).free.pop())
        ours, theirs = (
            runner.step([(both[side], n) for both, n in zip(streams, step, strict=True) if n], all_rows=True)
            for side, runner in enumerate((device, plain))
        )
        assert differs(ours, theirs) <= TOLERANCE


def test_layers_that_attend_alike_share_a_plan(model_folder: ModelFolder) -> None:
    for architecture, num_kinds in (("llama", 1), ("mistral", 1), ("gemma2", 2)):
        base = DeviceBase(model_folder(architecture))
        base.allocate_kv(8, 4)
        assert len(attention_of(base.base)._kinds) == num_kinds


def test_each_bucket_has_wrappers_of_its_own(model_folder: ModelFolder) -> None:
    base = DeviceBase(model_folder("llama"))
    base.allocate_kv(8, 4)
    sizes = sorted(size for size, _ in attention_of(base.base)._decoders)
    assert tuple(sizes) == base.runner._graphs.buckets


def test_an_error_while_building_comes_with_the_first_step(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("nvcc is not there")

    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", broken)
    with pytest.raises(RuntimeError, match="nvcc"):
        DeviceBase(model_folder("llama")).allocate_kv(8, 4)


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype", "reason"),
    [
        (64, 64, torch.bfloat16, None),
        (128, 128, torch.float16, None),
        (128, 128, torch.float32, "16-bit"),
        (16, 16, torch.bfloat16, "heads of 16"),
        (128, 64, torch.bfloat16, "heads of 128 and 64"),
    ],
)
def test_what_flashinfer_cannot_serve_is_said(dim: int, value_dim: int, dtype: torch.dtype, reason: str | None) -> None:
    heads = LayerHeads(LayerShape(2, dim, value_dim), 4, ScoreRule(0.1, None, None))
    found = why_not([heads], dtype)
    assert found is None if reason is None else reason in str(found)
