"""Checks an uploaded adapter against the base and describes it: the whole path from files to manifest.

The format is PEFT's LoRA checkpoint. Nothing in it is executed, opened by name or fetched.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from registry.adapter_config import AdapterConfig, read_config
from registry.adapter_files import find_adapter
from registry.binding import Binder
from registry.config import RegistryConfig
from registry.digest import adapter_digest
from registry.faults import FaultList, shown
from registry.safetensors_header import read_header
from registry.strict_json import StrictJsonError, parse
from registry.types import AdapterManifest, BaseSpec, ModuleLora


def read_adapter(files: Mapping[str, Path], base: BaseSpec, config: RegistryConfig) -> AdapterManifest:
    """Check the upload `files` (relative name -> file on this machine) and return its manifest.

    Raises InvalidAdapter with every fault found, LimitExceeded when a file or their number is over the limits.
    """
    faults = FaultList()
    found = find_adapter(files, config, faults)
    adapter = read_config(found.config, faults) if found.config else None
    tensors = read_header(found.weights, faults) if found.weights else None
    if found.added_tokens:
        _check_added_tokens(found.added_tokens, base.vocab_size, config.max_config_bytes, faults)
    modules: tuple[ModuleLora, ...] = ()
    if found.weights and tensors is not None:
        modules = Binder(base, config, faults).bind(found.weights, tensors, adapter)
    faults.raise_if_any()
    assert found.weights is not None
    assert adapter is not None
    return _manifest(found.weights, modules, base, _names_base(adapter, base, faults), faults)


def _manifest(
    weights: Path, modules: tuple[ModuleLora, ...], base: BaseSpec, base_verified: bool, faults: FaultList
) -> AdapterManifest:
    with weights.open("rb") as file:
        blob_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return AdapterManifest(
        digest=adapter_digest(base.digest, modules),
        base_digest=base.digest,
        base_verified=base_verified,
        modules=modules,
        blob_sha256=blob_sha256,
        blob_bytes=weights.stat().st_size,
        warnings=faults.warnings(),
    )


def _names_base(adapter: AdapterConfig, base: BaseSpec, faults: FaultList) -> bool:
    """Whether the configuration names this base; the name is advice, so another one is only worth a warning."""
    if adapter.base_name is None:
        return False
    if _last_part(adapter.base_name) == _last_part(base.base_id):
        return True
    faults.warn(
        "base_name",
        f"base_model_name_or_path is {shown(adapter.base_name)}; the base served is {shown(base.base_id)}",
        hint="shapes and modules fit, but check that the adapter was trained on this base",
        field="base_model_name_or_path",
    )
    return False


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()


def _check_added_tokens(path: Path, vocab_size: int, max_bytes: int, faults: FaultList) -> None:
    try:
        if path.stat().st_size > max_bytes:
            raise StrictJsonError(f"larger than {max_bytes} bytes")
        tokens = parse(path.read_bytes())
        if not isinstance(tokens, dict) or not all(type(token_id) is int for token_id in tokens.values()):
            raise StrictJsonError("not a map from tokens to ids")
    except StrictJsonError as error:
        faults.add("added_tokens", f"{path.name}: {error}", field=path.name)
        return
    for token, token_id in tokens.items():
        if not 0 <= token_id < vocab_size:
            message = f"{path.name}: {shown(token)} has id {token_id}; the base has {vocab_size} tokens"
            faults.add("added_tokens", message, hint="an adapter cannot extend the vocabulary", field=path.name)
