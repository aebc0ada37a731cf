"""Where the base's files are: a local folder, a GGUF file converted once, or a hub snapshot. Loads no model."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from replica.config import ModelConfig
from replica.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

DType = Literal["float32", "bfloat16", "float16"]


def resolve_device(config: ModelConfig) -> torch.device:
    """The configured device; `auto` is CUDA where there is one. Raises ModelError for CUDA without a device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device is cuda, but torch sees no CUDA device; allowed here: auto, cpu")
    wants_cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if wants_cuda else "cpu")


def resolve_dtype(config: ModelConfig) -> DType:
    """The configured dtype; `auto` is float32 on the CPU and bfloat16 on CUDA."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if resolve_device(config).type == "cuda" else "float32"


def resolve_base(config: ModelConfig) -> Path:
    """A folder of safetensors with config and tokenizer. Raises ModelError that says what was looked for."""
    path = Path(config.base).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model.base is the file {path}; allowed: a .gguf file, a folder, a hub id")
        return _converted(path, config)
    if path.is_dir():
        return _checked_folder(path, with_weights=config.weights == "files")
    if path.suffix.lower() == ".gguf" or not HUB_ID.fullmatch(config.base):
        raise ModelError(f"model.base is {config.base!r}: there is no such file or folder")
    return _checked_folder(_snapshot(config))


def base_revision(config: ModelConfig, folder: Path) -> str | None:
    """The commit of the hub snapshot in `folder`, else what the configuration says."""
    is_snapshot = folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) is not None
    return folder.name if is_snapshot else config.revision


def _checked_folder(folder: Path, with_weights: bool = True) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json")
    if with_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no safetensors file; pickled weights are not loaded")
    return folder


def _snapshot(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(config.base, revision=config.revision, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"model.base is {config.base!r}: no such folder, and the hub said: {error}") from error


def _converted(gguf: Path, config: ModelConfig) -> Path:
    """The safetensors copy of a GGUF file, made once for its content and dtype, by whichever replica comes first."""
    dtype = resolve_dtype(config)
    parent = config.cache_dir.expanduser() / "converted"
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{gguf.stem}-{_file_sha256(gguf)[:16]}-{dtype}"
    with _locked(parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            partial = parent / f"{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _convert(gguf, partial, dtype)
            os.rename(partial, folder)
    return _checked_folder(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with the process, so a crash leaves nothing locked."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, folder: Path, dtype: DType) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # the parser of a broken file may raise anything
        raise ModelError(f"{gguf} cannot be converted: {error}") from error
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
