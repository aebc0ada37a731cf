"""Finds the adapter among the files of an upload. Knows names, sizes and kinds of files, nothing of their content."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from registry.config import RegistryConfig
from registry.errors import LimitExceeded
from registry.faults import FaultList, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
BASE_FILE = "lorafleet_base.json"
TOKENIZER_FILES = (ADDED_TOKENS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
KEPT_FILES = frozenset({CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, CHAT_TEMPLATE_FILE, BASE_FILE, *TOKENIZER_FILES})
"""Names that mean something here; other files of an upload are ignored and never opened."""

_SHARD = re.compile(r"adapter_model(-\d+-of-\d+\.(safetensors|bin)|\.(safetensors|bin)\.index\.json)")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files that matter; None for what the upload lacks."""

    config: Path | None
    weights: Path | None
    base: Path | None
    tokenizer: Mapping[str, Path]
    """By name, what may add tokens: see TOKENIZER_FILES."""


def find_adapter(files: Mapping[str, Path], config: RegistryConfig, faults: FaultList) -> AdapterFiles:
    """Pick one adapter from the upload's root, or from its only sub-folder that holds one.

    `files` maps relative paths with `/` to files on this machine. Raises LimitExceeded.
    """
    if len(files) > config.max_files:
        raise LimitExceeded(f"the upload has {len(files)} files; at most {config.max_files} are allowed")
    sane = {name: path for name, path in files.items() if _is_sane(name, path, faults)}
    _refuse_twins(sane, faults)
    folder = _adapter_folder(sane, faults)
    members = {
        PurePosixPath(name).name: path for name, path in sane.items() if str(PurePosixPath(name).parent) == folder
    }
    _refuse_other_forms(members, faults)
    found = AdapterFiles(
        config=_required(members, CONFIG_FILE, "config_missing", config.max_config_bytes, faults),
        weights=_required(members, WEIGHTS_FILE, "weights_missing", config.max_adapter_bytes, faults),
        base=members.get(BASE_FILE),
        tokenizer={name: members[name] for name in TOKENIZER_FILES if name in members},
    )
    if CHAT_TEMPLATE_FILE in members:
        faults.warn("chat_template_ignored", f"{CHAT_TEMPLATE_FILE} is ignored; the base model's template is used")
    return found


def weights_path(files: Mapping[str, Path], config: RegistryConfig) -> Path:
    """The file that becomes the blob, of an upload that has passed every check."""
    weights = find_adapter(files, config, FaultList()).weights
    assert weights is not None
    return weights


def is_plain_path(name: str) -> bool:
    """Whether `name` is a relative path of plain parts, with `/` between them."""
    return not ({"\\", "\0"} & set(name)) and all(part not in ("", ".", "..") for part in name.split("/"))


def is_shard(name: str) -> bool:
    """Whether `name` is a part of sharded weights or their index."""
    return _SHARD.fullmatch(name) is not None


def _is_sane(name: str, path: Path, faults: FaultList) -> bool:
    if not is_plain_path(name):
        faults.add("unsafe_path", f"the file name {shown(name)} is not a plain relative path")
        return False
    if path.is_symlink() or not path.is_file():
        faults.add("not_a_file", f"{shown(name)} is not a regular file; links and devices are refused")
        return False
    return True


def _refuse_twins(files: Mapping[str, Path], faults: FaultList) -> None:
    seen: dict[str, str] = {}
    for name in files:
        twin = seen.setdefault(name.casefold(), name)
        if twin != name:
            faults.add("ambiguous_files", f"{shown(twin)} and {shown(name)} differ in case only")


def _adapter_folder(files: Mapping[str, Path], faults: FaultList) -> str:
    """The folder that holds the adapter: the root if it has any of its files, else the one sub-folder that does."""
    telling = (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE)
    folders = {str(PurePosixPath(name).parent) for name in files if PurePosixPath(name).name in telling}
    if "." in folders or not folders:
        return "."
    first, *others = sorted(folders)
    if others:
        listed = ", ".join(shown(folder) for folder in sorted(folders)[:5])
        faults.add("several_adapters", f"the upload holds several adapters ({listed})", hint="upload one at a time")
    return first


def _refuse_other_forms(members: Mapping[str, Path], faults: FaultList) -> None:
    if PICKLE_FILE in members:
        faults.add(
            "pickle",
            f"{PICKLE_FILE} is a pickle, which can run code when it is opened; it is refused",
            hint="save with safe_serialization=True and upload adapter_model.safetensors alone",
        )
    for name in members:
        if is_shard(name):
            faults.add(
                "sharded", f"{name}: shards and indexes are not part of the adapter format", hint="save one file"
            )


def _required(members: Mapping[str, Path], name: str, code: str, max_bytes: int, faults: FaultList) -> Path | None:
    path = members.get(name)
    if path is None:
        faults.add(code, f"{name} is missing", hint="upload the folder that PEFT's save_pretrained wrote", field=name)
        return None
    num_bytes = path.stat().st_size
    if num_bytes > max_bytes:
        raise LimitExceeded(f"{name} has {num_bytes} bytes; at most {max_bytes} are allowed")
    return path
