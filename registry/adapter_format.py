"""Checks an uploaded adapter against the base and describes it: the whole path from files to manifest.

The format is PEFT's LoRA checkpoint. Nothing in it is executed, opened by name or fetched.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from registry.adapter_config import read_config
from registry.adapter_files import find_adapter
from registry.base_binding import bind_base
from registry.binding import Binder
from registry.config import RegistryConfig
from registry.digest import adapter_digest
from registry.faults import FaultList
from registry.safetensors_header import read_header
from registry.template import check_template
from registry.tokenizer_files import BaseTokens, check_tokenizer, no_base_tokens
from registry.types import AdapterManifest, BaseBinding, BaseSpec, ModuleLora


def read_adapter(
    files: Mapping[str, Path], base: BaseSpec, config: RegistryConfig, base_tokens: BaseTokens = no_base_tokens
) -> AdapterManifest:
    """Check the upload `files` (relative name -> file on this machine) and return its manifest.

    Raises InvalidAdapter with every fault found, LimitExceeded when a file or their number is over the limits.
    """
    faults = FaultList()
    found = find_adapter(files, config, faults)
    adapter = read_config(found.config, faults) if found.config else None
    tensors = read_header(found.weights, faults) if found.weights else None
    check_tokenizer(found.tokenizer, base, base_tokens, faults)
    modules: tuple[ModuleLora, ...] = ()
    if found.weights and tensors is not None:
        modules = Binder(base, config, faults).bind(found.weights, tensors, adapter)
    check_template(modules, config.template, faults)
    bound = bind_base(adapter, found.base, base, config.max_config_bytes, faults)
    faults.raise_if_any()
    assert found.weights is not None
    return _manifest(found.weights, modules, bound, faults)


def _manifest(weights: Path, modules: tuple[ModuleLora, ...], bound: BaseBinding, faults: FaultList) -> AdapterManifest:
    with weights.open("rb") as file:
        blob_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return AdapterManifest(
        digest=adapter_digest(bound.digest, modules),
        base_digest=bound.digest,
        base_verified=bound.verified_by != "shapes",
        base=bound,
        modules=modules,
        blob_sha256=blob_sha256,
        blob_bytes=weights.stat().st_size,
        warnings=faults.warnings(),
    )
