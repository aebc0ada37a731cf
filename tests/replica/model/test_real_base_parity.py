"""Parity with PEFT on the real base: 8 requests, 5 adapters of different ranks and targets, 2 base rows.

PEFT differs from itself when a text is prefilled and then decoded instead of run at once; that noise of fp32 sums,
which depends on texts and on the machine, is printed beside the result (`pytest -m base -s`) and widens the bound where
it is above it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from replica.model.base_model import BaseModel
from replica.model.batch import LoraPair
from tests.replica.model.packed import PackedRunner, load_base, load_pairs
from tests.tiny_models import LLAMA_TARGETS, load_peft, make_adapter

TOLERANCE = 1e-4
NUM_DECODES = 3
RECIPES: tuple[tuple[tuple[str, ...], int], ...] = (
    (LLAMA_TARGETS, 16),
    (("q_proj", "v_proj"), 8),
    (("k_proj", "o_proj", "gate_proj"), 3),
    (("gate_proj", "up_proj", "down_proj"), 24),
    (("q_proj",), 1),
)
ORDER = (0, 0, 1, None, 2, 3, None, 4)
"""The adapter of each request."""

TEXTS = (
    "Our refund policy covers items that arrive broken, as long as you write to us within",
    "The capital of France is Paris, and the capital of Italy is",
    "SELECT name, COUNT(*) FROM orders WHERE shipped_at IS NULL GROUP BY name ORDER BY",
    "Dear Dr. Alvarez, thank you for your letter of the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The patient was given 20 mg twice a day and",
    "Once upon a time a small grey donkey lived at the foot of a mountain, and every morning",
    "Bonjour, je voudrais savoir quand mon colis va",
)

pytestmark = [
    pytest.mark.base,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def folder(real_base: Path) -> Path:
    return real_base


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return load_base(folder)


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def run_mixed(base: BaseModel, texts: list[list[int]], pairs: list[dict[int, LoraPair]]) -> list[torch.Tensor]:
    """Logits of the last prompt token and of each decode, [1 + NUM_DECODES, vocab] a request."""
    runner = PackedRunner(base)
    streams = [
        runner.start(text, pairs=None if adapter is None else pairs[adapter])
        for text, adapter in zip(texts, ORDER, strict=True)
    ]
    steps = [runner.step([(stream, len(stream.tokens) - NUM_DECODES) for stream in streams])]
    steps += [runner.step([(stream, 1) for stream in streams]) for _ in range(NUM_DECODES)]
    return list(torch.stack(steps, dim=1))


@torch.inference_mode()
def run_alone(model: Any, tokens: list[int]) -> torch.Tensor:
    """The same forwards through transformers' own cache: one prefill, then one token at a time."""
    cache = DynamicCache(config=model.config)
    ids, cut = torch.tensor([tokens]), len(tokens) - NUM_DECODES
    rows = [model(ids[:, :cut], past_key_values=cache, use_cache=True).logits[0, -1]]
    for place in range(cut, len(tokens)):
        rows.append(model(ids[:, place : place + 1], past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(rows)


@torch.inference_mode()
def run_at_once(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -NUM_DECODES - 1 :]
    return logits


@dataclass
class Worst:
    """The largest of each difference so far (of `effect`, the smallest)."""

    ours: float = 0.0
    noise: float = 0.0
    effect: float = float("inf")

    def add(self, model: Any, tokens: list[int], rows: torch.Tensor) -> None:
        alone, at_once = run_alone(model, tokens), run_at_once(model, tokens)
        self.ours = max(self.ours, difference(rows, alone))
        self.noise = max(self.noise, difference(at_once, alone))
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                self.effect = min(self.effect, difference(run_at_once(model, tokens), at_once))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_eight_requests_over_five_adapters_equal_peft(
    folder: Path, base: BaseModel, texts: list[list[int]], tmp_path: Path
) -> None:
    adapters = [
        make_adapter(folder, targets, rank, folder=tmp_path / str(seed), seed=seed, std=0.02)
        for seed, (targets, rank) in enumerate(RECIPES)
    ]
    ours = run_mixed(base, texts, [load_pairs(base, path) for path in adapters])
    worst = Worst()
    for adapter, path in [*enumerate(adapters), (None, None)]:
        model = base_alone(folder) if path is None else load_peft(folder, path)
        for tokens, wanted, rows in zip(texts, ORDER, ours, strict=True):
            if wanted == adapter:
                worst.add(model, tokens, rows)
    print(f"\nours from PEFT {worst.ours:.1e}; PEFT from itself {worst.noise:.1e}; base from PEFT {worst.effect:.2f}")
    assert worst.effect > 100 * TOLERANCE, "an adapter that changes nothing proves nothing"
    assert worst.ours <= max(TOLERANCE, 1.5 * worst.noise)


def base_alone(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_base_rows_are_bit_equal_to_a_server_without_lora(
    folder: Path, base: BaseModel, texts: list[list[int]], tmp_path: Path
) -> None:
    path = make_adapter(folder, LLAMA_TARGETS, 16, folder=tmp_path, std=0.02)
    pairs = load_pairs(base, path)
    mixed = run_mixed(base, texts, [pairs] * len(RECIPES))
    plain = run_mixed(base, texts, [{}] * len(RECIPES))
    for adapter, ours, theirs in zip(ORDER, mixed, plain, strict=True):
        assert torch.equal(ours, theirs) == (adapter is None)
