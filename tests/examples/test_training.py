"""The pieces of training that need no model."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from examples.corpus import Sample
from examples.recipes import RECIPES
from examples.scoring import IGNORED, answer_losses, collate, encode
from examples.train_adapters import batches, fit, learning_rate_factor, lora_config, save

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""PEFT asks transformers by the old name."""


class CharTokenizer:
    """One token a character."""

    pad_token_id = 0

    def __call__(self, text: str, return_offsets_mapping: bool, add_special_tokens: bool) -> dict[str, list[object]]:
        assert return_offsets_mapping
        assert not add_special_tokens
        return {
            "input_ids": [ord(char) % 32 for char in text],
            "offset_mapping": [(i, i + 1) for i in range(len(text))],
        }


class BigramModel(torch.nn.Module):
    """A causal LM whose hidden state is its own token: the parts that scoring asks for, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 8)
        self.head = torch.nn.Linear(8, 32, bias=False)

    def get_decoder(self) -> "BigramModel":
        return self

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> object:
        class Output:
            last_hidden_state = self.embed(input_ids)

        return Output


def test_labels_are_the_answers_tokens_one_step_ahead() -> None:
    token_ids, labels = encode(CharTokenizer(), Sample("abc", "de"))
    assert token_ids.tolist() == [1, 2, 3, 4, 5]
    assert labels.tolist() == [IGNORED, IGNORED, 4, 5, IGNORED]


def test_collate_pads_at_the_right_and_masks_the_padding() -> None:
    pairs = [encode(CharTokenizer(), sample) for sample in (Sample("abc", "de"), Sample("a", "b"))]
    batch = collate(pairs, pad_token_id=0)
    assert batch.token_ids[1].tolist() == [1, 2, 0, 0, 0]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.labels[1].tolist() == [2, IGNORED, IGNORED, IGNORED, IGNORED]


def test_losses_are_those_of_the_full_logits_where_labels_are() -> None:
    torch.manual_seed(0)
    model = BigramModel()
    batch = collate([encode(CharTokenizer(), s) for s in (Sample("abc", "de"), Sample("fg", "h"))], pad_token_id=0)
    logprobs = model.head(model.embed(batch.token_ids)).log_softmax(-1)
    expected = torch.stack([-logprobs[0, 2, 4], -logprobs[0, 3, 5], -logprobs[1, 1, 8]])
    torch.testing.assert_close(answer_losses(model, batch), expected)


def test_batches_show_every_sample_once_an_epoch_and_repeat_with_the_seed() -> None:
    samples = [Sample(str(i), "x") for i in range(24)]
    stream = batches(random.Random(3), samples, size=8)
    epoch = [sample for _ in range(3) for sample in next(stream)]
    assert sorted(epoch, key=lambda sample: int(sample.context)) == samples
    assert next(batches(random.Random(3), samples, size=8)) == epoch[:8]


def test_learning_rate_warms_up_and_decays() -> None:
    factors = [learning_rate_factor(step, 40) for step in range(40)]
    peak = factors.index(max(factors))
    assert max(factors) == 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert 0.05 <= factors[-1] < 0.1


@pytest.mark.parametrize("tenant", sorted(RECIPES))
def test_configuration_has_the_recipes_shape(tenant: str) -> None:
    recipe, config = RECIPES[tenant], lora_config(RECIPES[tenant])
    assert (config.r, config.lora_alpha, config.use_rslora) == (recipe.rank, recipe.alpha, recipe.use_rslora)
    assert config.target_modules == set(recipe.targets)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, initializer_range=0.5, **sizes))


def test_saved_adapter_is_bf16_and_names_no_machine(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    tiny_llama.name_or_path = str(tmp_path / "base")
    model = get_peft_model(tiny_llama, lora_config(RECIPES["sql"]))
    save(model, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
    assert config["target_modules"] == sorted(RECIPES["sql"].targets)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as tensors:
        assert {tensors.get_tensor(key).dtype for key in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_fitting_lowers_the_loss_and_leaves_the_base_alone(tiny_llama: LlamaForCausalLM) -> None:
    frozen = {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    tokenizer = CharTokenizer()
    samples = [Sample("abc", "de")] * 8
    batch = collate([encode(tokenizer, sample) for sample in samples], tokenizer.pad_token_id)
    model = get_peft_model(tiny_llama, lora_config(RECIPES["sql"]))
    before = answer_losses(model.get_base_model(), batch).mean().item()
    fit(model.get_base_model(), tokenizer, samples, replace(RECIPES["sql"], num_steps=12, learning_rate=0.02))
    assert answer_losses(model.get_base_model(), batch).mean().item() < before / 2
    clean = model.unload().state_dict()
    assert all(torch.equal(clean[name], value) for name, value in frozen.items())
