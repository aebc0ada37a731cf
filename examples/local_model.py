"""Loads the base model into this process, in fp32, for training and for checks without a server."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.corpus import render

PROBE = ({"role": "user", "content": "Hello"},)


def load_base(source: str) -> tuple[Any, Any]:
    """The causal LM and the tokenizer of a folder, a hub id or a GGUF file.

    Raises ValueError when the model's chat template is not the one that the examples are rendered with.
    """
    path = Path(source).expanduser()
    is_gguf = path.suffix == ".gguf"
    where = str(path.parent if is_gguf else path if path.exists() else source)
    extra = {"gguf_file": path.name} if is_gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(where, **extra)
    check_template(tokenizer, source)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **extra)
    forget_quantization(model)
    return model, tokenizer


def check_template(tokenizer: Any, source: str) -> None:
    """Raise ValueError unless the tokenizer renders a conversation as `corpus.render` does."""
    text = tokenizer.apply_chat_template(list(PROBE), tokenize=False, add_generation_prompt=True)
    if text != render(PROBE):
        raise ValueError(f"the chat template of {source} is not that of SmolLM2-135M-Instruct")


def forget_quantization(model: Any) -> None:
    """Drop what a GGUF file leaves behind: its weights are plain fp32 now, and PEFT must treat them so."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
