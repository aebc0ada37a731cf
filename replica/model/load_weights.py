"""From a base's folder to a model on its device: weights from files, or random ones for benchmarks."""

from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from replica.config import ModelConfig
from replica.errors import ModelError
from replica.model.architecture import refuse_config
from replica.model.base_files import resolve_device, resolve_dtype
from replica.model.paged_attention import HANDLED_IMPLEMENTATION, IMPLEMENTATION, handled_attention, paged_attention

AttentionInterface.register(IMPLEMENTATION, paged_attention)
AttentionInterface.register(HANDLED_IMPLEMENTATION, handled_attention)

OFFLINE = {"local_files_only": True, "trust_remote_code": False}


def load_model(folder: Path, config: ModelConfig) -> Any:
    """The model on its device, in its dtype, attending through `paged_attention`. Raises ModelError."""
    try:
        hf_config = AutoConfig.from_pretrained(folder, **OFFLINE)
    except Exception as error:  # any library may be behind a config, and raise anything
        raise ModelError(f"{folder} has a config.json that cannot be read: {error}") from error
    refuse_config(hf_config)
    dtype, device = getattr(torch, resolve_dtype(config)), resolve_device(config)
    make = _random_model if config.weights == "random" else _model_of_files
    try:
        model = make(folder, hf_config, dtype, device, config.seed)
    except Exception as error:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    model.set_attn_implementation(IMPLEMENTATION)
    return model.to(device).eval()


def _model_of_files(folder: Path, hf_config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, config=hf_config, dtype=dtype, use_safetensors=True, **OFFLINE)


def _random_model(folder: Path, hf_config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The architecture with the weights that its own initialisation gives for `seed`, made on the device itself."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
