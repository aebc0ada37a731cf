"""The paged, packed forward equals transformers' own, for every architecture."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.replica.model.conftest import ModelFolder
from tests.replica.model.packed import PackedRunner, Stream, load_base, prompts
from tests.tiny_models import ARCHITECTURES

TOLERANCE = 1e-4
LENGTHS = (1, 3, 7, 16, 30, 41)


@pytest.fixture(params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Path:
    return model_folder(request.param)


@torch.inference_mode()
def oracle(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] of transformers' eager attention over the whole sequence at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_whole_prompts_packed_equal_transformers_row_by_row(folder: Path) -> None:
    runner = PackedRunner(load_base(folder))
    texts = prompts(LENGTHS)
    logits = runner.step([(runner.start(text), len(text)) for text in texts], all_rows=True)
    assert logits.dtype == torch.float32
    assert_same(logits, torch.cat([oracle(folder, text) for text in texts]))


def test_seven_token_chunks_equal_transformers(folder: Path) -> None:
    runner = PackedRunner(load_base(folder))
    text = prompts([45])[0]
    stream = runner.start(text)
    chunks = [7] * 6 + [3]
    logits = torch.cat([runner.step([(stream, n)], all_rows=True) for n in chunks])
    assert_same(logits, oracle(folder, text))


def test_greedy_decode_in_a_mixed_batch_equals_generate(folder: Path) -> None:
    """Sequences join one step apart, so every step mixes decodes with whole prompts or chunks."""
    num_new = 14
    texts = prompts(LENGTHS)
    runner = PackedRunner(load_base(folder))
    streams = [runner.start(text, room=num_new) for text in texts]
    for _ in range(80):
        work = next_work(streams, texts, num_new)
        if not work:
            break
        logits = runner.step(work)
        for row, (stream, _) in zip(logits, work, strict=True):
            if stream.cached == len(stream.tokens):
                stream.tokens.append(int(row.argmax()))
    for text, stream in zip(texts, streams, strict=True):
        assert stream.tokens[len(text) :] == greedy(folder, text, num_new)


def next_work(streams: list[Stream], texts: list[list[int]], num_new: int) -> list[tuple[Stream, int]]:
    """Decode everyone who has a prompt in the cache, and bring in nine more prompt tokens of the next one."""
    work = [
        (stream, 1)
        for stream, text in zip(streams, texts, strict=True)
        if len(text) <= stream.cached and len(stream.tokens) < len(text) + num_new
    ]
    waiting = next((s for s, text in zip(streams, texts, strict=True) if s.cached < len(text)), None)
    if waiting is not None:
        work.insert(len(work) // 2, (waiting, min(9, len(waiting.tokens) - waiting.cached)))
    return work


@torch.inference_mode()
def greedy(folder: Path, text: list[int], num_new: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 258
    ids = torch.tensor([text])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
    tokens: list[int] = out[0, len(text) :].tolist()
    return tokens


def test_decode_groups_of_very_different_lengths_equal_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.model.attention_plan.MIN_SAVED_TOKENS", 8)
    runner = PackedRunner(load_base(folder))
    texts = prompts([5, 60, 4, 61, 25])
    streams = [runner.start(text) for text in texts]
    runner.step([(stream, len(stream.tokens) - 1) for stream in streams])
    logits = runner.step([(stream, 1) for stream in streams])
    assert_same(logits, torch.stack([oracle(folder, text)[-1] for text in texts]))


def test_reused_blocks_show_nothing_of_their_last_owner(model_folder: ModelFolder) -> None:
    """The last owner left NaN in every slot; masked places would carry it into sums, as 0 * NaN is NaN."""
    base = load_base(model_folder("llama"))
    runner = PackedRunner(base)
    texts = prompts([6, 3])
    clean = [runner.step([(runner.start(text), len(text))])[0] for text in texts]
    assert base._cache is not None
    for tensor in (*base._cache.keys, *base._cache.values):
        tensor.fill_(float("nan"))
    streams = [runner.start(text) for text in texts]
    runner.step([(stream, 2) for stream in streams])
    runner.step([(streams[0], 3)])
    dirty = runner.step([(stream, 1) for stream in streams])
    assert_same(dirty, torch.stack(clean))
