"""Tiny random base models and adapters on disk, for tests. Each folder loads by path, like a real one.

Weights are large enough for logits of size 1 to 10, so that a wrong projection or mask cannot hide in rounding.
"""

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 264
BOS_ID, EOS_ID = 256, 257
CONTEXT_LENGTH = 256

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": 258,
}
_WINDOWED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOWED}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 16}),
    "mistral": ("mistral", {**_COMMON, "sliding_window": 12}),
    "gemma2": ("gemma2", {**_COMMON, **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3_text", {**_COMMON, **_GEMMA}),
    "phi3": ("phi3", _COMMON),
    "gpt2": ("gpt2", _GPT2),
}
"""Architecture -> transformers' model type and the fields of its config."""

ARCHITECTURES = tuple(CONFIGS)

ALL_TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def all_targets(architecture: str) -> tuple[str, ...]:
    """Every projection name of the architecture that LoRA may touch."""
    return ALL_TARGETS.get(architecture, LLAMA_TARGETS)


def make_model(folder: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model with its tokenizer into `folder` (fp32 safetensors) and return the folder.

    `overrides` replace fields of the config (`num_hidden_layers=1`).
    """
    model_type, fields = CONFIGS[architecture]
    config = AutoConfig.for_model(model_type, **{**fields, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise_biases(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _randomise_biases(model: torch.nn.Module) -> None:
    """Fresh models have zero biases, which would hide a bias that is dropped or added twice."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.1)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0 to 255 are the bytes' symbols, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def projection_shapes(model_folder: Path) -> dict[str, tuple[int, int]]:
    """Module path -> (in, out) of every two-dimensional weight inside the decoder layers."""
    conv1d = _stores_conv1d(model_folder)
    shapes: dict[str, tuple[int, int]] = {}
    with safe_open(model_folder / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            shape = file.get_slice(key).get_shape()
            in_layer = any(part.isdigit() for part in key.split("."))
            if in_layer and key.endswith(".weight") and len(shape) == 2:
                first, second = shape
                shapes[key.removesuffix(".weight")] = (first, second) if conv1d else (second, first)
    return shapes


def _stores_conv1d(model_folder: Path) -> bool:
    """Whether weights are (in, out), as in GPT-2."""
    return bool(json.loads((model_folder / "config.json").read_text())["model_type"] == "gpt2")


def make_adapter(
    model_folder: Path,
    targets: Iterable[str],
    rank: int,
    *,
    folder: Path,
    alpha: float | None = None,
    seed: int = 0,
    std: float = 0.1,
    zero_b: bool = False,
    dtype: torch.dtype = torch.float32,
    layers: Iterable[int] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random non-zero PEFT adapter into `folder` (both files) and return the folder.

    `targets` are last path components; `rank_pattern` maps such names to their own rank; `layers` limits the adapter
    to some layers; `config` adds or replaces fields of adapter_config.json. A and B are normal with deviation `std`.
    """
    targets, ranks = sorted(targets), dict(rank_pattern or {})
    layers = None if layers is None else sorted(layers)
    chosen = _targeted(projection_shapes(model_folder), targets, layers)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, (in_features, out_features) in chosen.items():
        module_rank = ranks.get(path.rpartition(".")[2], rank)
        a = torch.randn(module_rank, in_features, generator=generator) * std
        b = torch.randn(out_features, module_rank, generator=generator) * (0.0 if zero_b else std)
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = _adapter_config(targets, rank, alpha, layers, ranks)
    fields |= {"fan_in_fan_out": _stores_conv1d(model_folder), **(config or {})}
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True))
    return folder


def load_peft(model_folder: Path, adapter_folder: Path) -> torch.nn.Module:
    """PEFT's own model over a fresh fp32 base, in eval mode: the oracle for parity.

    Attention is eager, which knows soft caps in every version of transformers.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
        model: torch.nn.Module = PeftModel.from_pretrained(base, adapter_folder).eval()
    return model


def _targeted(
    shapes: Mapping[str, tuple[int, int]], targets: list[str], layers: list[int] | None
) -> dict[str, tuple[int, int]]:
    return {
        path: shape
        for path, shape in sorted(shapes.items())
        if path.rpartition(".")[2] in targets and (layers is None or _layer_of(path) in layers)
    }


def _layer_of(path: str) -> int:
    return next(int(part) for part in path.split(".") if part.isdigit())


def _adapter_config(
    targets: list[str], rank: int, alpha: float | None, layers: list[int] | None, rank_pattern: dict[str, int]
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {},
        "layers_to_transform": layers,
        "inference_mode": True,
    }
