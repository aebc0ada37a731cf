"""What makers of corpus adapters share: a tiny base, PEFT's own save_pretrained, and careful damage to its files."""

import copy
import json
import shutil
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
QV = ["q_proj", "v_proj"]
Tensors = dict[str, torch.Tensor]


class Kit:
    """One base on disk and in memory, and what can be made for it."""

    def __init__(self, base: Path) -> None:
        self.folder = base
        self._plain = base.parent / f"{base.name}-plain-adapter"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")

    def save(self, folder: Path, **fields: Any) -> Path:
        """What PEFT saves of a `LoraConfig(**fields)` with noise in it; the folder that holds the adapter."""
        if fields:
            return self._save(folder, **fields)
        if not self._plain.is_dir():
            self._save(self._plain)
        return Path(shutil.copytree(self._plain, folder, dirs_exist_ok=True))

    def _save(self, folder: Path, *, seed: int = 0, name: str = "default", dtype: Any = None, **fields: Any) -> Path:
        fields = {"r": 4, "lora_alpha": 8, "target_modules": QV, "task_type": "CAUSAL_LM", **fields}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(self.base), LoraConfig(**fields), adapter_name=name)
            fill(model, seed)
            model.save_pretrained(folder)
        home = folder if name == "default" else folder / name
        if dtype is not None:
            edit_tensors(home, lambda tensors: tensors.update({key: t.to(dtype) for key, t in tensors.items()}))
        return home

    def save_converted(self, folder: Path, init: str, **fields: Any) -> Path:
        """An adapter whose initialisation changed the base, saved as plain LoRA on the original base."""
        first = folder.parent / f"{folder.name}-initial"
        fields = {"r": 4, "lora_alpha": 8, "target_modules": QV, "task_type": "CAUSAL_LM", **fields}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(self.base), LoraConfig(init_lora_weights=init, **fields))
            model.peft_config["default"].init_lora_weights = True
            model.save_pretrained(first)
            model.peft_config["default"].init_lora_weights = init
            fill(model, 5, add=True)
            model.save_pretrained(folder, path_initial_model_for_weight_conversion=str(first))
        shutil.rmtree(first)
        return folder

    @torch.inference_mode()
    def logits(self, adapter: Path, tokens: list[int]) -> torch.Tensor:
        """PEFT's own, over the clean base: [len(tokens), vocab]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(copy.deepcopy(self.base), adapter).eval()
        out: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return out


def fill(model: torch.nn.Module, seed: int, *, add: bool = False) -> None:
    """Noise in place of (or on top of) every trainable value, so that nothing is zero by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.15
                parameter.add_(noise) if add else parameter.copy_(noise)


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of adapter_config.json; `...` removes one."""
    path = folder / CONFIG
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def rename(folder: Path, change: Callable[[str], str]) -> None:
    def apply(tensors: Tensors) -> None:
        renamed = {change(key): tensor for key, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_tensors(folder, apply)


def to_zip(folder: Path, prefix: str = "", extra: Mapping[str, bytes] | None = None) -> None:
    """Replace the folder's content by one zip of it."""
    files = take_out(folder)
    with zipfile.ZipFile(folder / "adapter.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*files.items(), *(extra or {}).items()]:
            archive.writestr(f"{prefix}{name}", data)


def to_tar(folder: Path, mode: str = "w:gz", prefix: str = "", extra: list[tarfile.TarInfo] | None = None) -> None:
    """Replace the folder's content by one tar of it."""
    from io import BytesIO

    files = take_out(folder)
    with tarfile.open(folder / "adapter.tar.gz", mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(f"{prefix}{name}")
            info.size = len(data)
            archive.addfile(info, BytesIO(data))
        for info in extra or []:
            archive.addfile(info)


def take_out(folder: Path) -> dict[str, bytes]:
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return files


Build = Callable[[Kit, Path], object]
"""Writes an upload into a folder."""


@dataclass(frozen=True)
class Case:
    """One adapter of the corpus. `code` None: it must be served, with PEFT's logits and exactly these `warnings`."""

    name: str
    build: Build
    code: str | None = None
    also: frozenset[str] = field(default_factory=frozenset)
    """Codes that come along by necessity."""
    warnings: frozenset[str] = field(default_factory=frozenset)
    architecture: str = "llama"

    def __str__(self) -> str:
        return self.name
