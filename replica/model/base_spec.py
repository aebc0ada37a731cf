"""What a loaded base says of itself to the registry: digests of its projections, tokenizer, template, lengths."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from registry.types import BaseSpec, ModuleSpec
from replica.errors import ModelError
from replica.model.batch import Site

HASH_THREADS = 4


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The fast tokenizer as one JSON document, with what the chat template needs."""

    json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read or convert the tokenizer of a base's folder. Raises ModelError when there is none that is fast."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the parser of a broken file may raise anything
        raise ModelError(f"{folder} has no tokenizer that can be read: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{folder}: {type(tokenizer).__name__} has no tokenizer.json form")
    file = folder / "tokenizer.json"
    return TokenizerFiles(
        json=file.read_bytes() if file.is_file() else backend.to_str().encode(),
        chat_template=_template(tokenizer.chat_template),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_id=tokenizer.eos_token_id,
    )


def _template(value: str | Mapping[str, str] | None) -> str | None:
    return value.get("default") if isinstance(value, Mapping) else value


def eos_ids(model: Any, tokenizer: TokenizerFiles) -> tuple[int, ...]:
    """Ids that end a text: the generation config's, else the config's, else the tokenizer's; sorted."""
    for source in (model.generation_config, model.config.get_text_config(decoder=True)):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(sorted({found} if isinstance(found, int) else {int(token) for token in found}))
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def module_specs(sites: Iterable[Site], weights: Mapping[str, torch.Tensor]) -> tuple[ModuleSpec, ...]:
    """Specs of the sites, in order of path; `weights` maps a site's path to its tensor as the base stores it."""
    ordered = sorted(sites, key=lambda site: site.path)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(tensor_sha256, (weights[site.path] for site in ordered)))
    return tuple(_module_spec(site, digest) for site, digest in zip(ordered, digests, strict=True))


def named_specs(sites: Iterable[Site], source: Mapping[str, Any]) -> tuple[ModuleSpec, ...]:
    """Specs of sites whose weights follow from `source` alone: its canonical JSON stands for their bytes."""
    document = json.dumps(source, sort_keys=True, separators=(",", ":"), default=str)
    ordered = sorted(sites, key=lambda site: site.path)
    return tuple(
        _module_spec(site, hashlib.sha256(f"{document}\n{site.path}".encode()).hexdigest()) for site in ordered
    )


def _module_spec(site: Site, sha256: str) -> ModuleSpec:
    return ModuleSpec(
        path=site.path, in_features=site.in_features, out_features=site.out_features, kind=site.kind, sha256=sha256
    )


def tensor_sha256(tensor: torch.Tensor) -> str:
    """sha256 in hexadecimal over the raw bytes, row by row, in the dtype the tensor has."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def base_digest(modules: Iterable[ModuleSpec]) -> str:
    """sha256 over the canonical JSON (sorted keys, no spaces) of the modules."""
    document = [module.model_dump(mode="json") for module in modules]
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def build_spec(
    base_id: str,
    revision: str | None,
    model: Any,
    modules: tuple[ModuleSpec, ...],
    tokenizer: TokenizerFiles,
    *,
    context_length: int,
    vocab_size: int,
) -> BaseSpec:
    """Put the record together. `base_id` is the name that clients use for the base, `revision` the hub's commit."""
    return BaseSpec(
        base_id=base_id,
        revision=revision,
        digest=base_digest(modules),
        architecture=type(model).__name__,
        modules=modules,
        context_length=context_length,
        vocab_size=vocab_size,
        tokenizer_sha256=hashlib.sha256(tokenizer.json).hexdigest(),
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=eos_ids(model, tokenizer),
    )
