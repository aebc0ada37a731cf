"""The grammar of tensor names in an adapter file, and what to say of a name that cannot be bound.

A LoRA tensor is `base_model.model.<module path>.lora_A.weight` or `...lora_B.weight`; anything else is refused, since
whatever is left unbound would make the answer silently wrong, and a base weight would damage every tenant.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from registry.faults import FaultList, shown
from registry.target_rules import dotted_suffixes

PREFIX = "base_model.model."
Side = Literal["A", "B"]

_LORA = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")

_VELORA = re.compile(r"(?P<path>.+)\.lora_velora_embed(?:\.weight)?")
"""Compresses activations for the backward pass; the delta is B @ A all the same."""

_SPECIAL: tuple[tuple[str, str, str], ...] = (
    (r".*\.lora_magnitude_vector(\.weight)?", "dora", "is a DoRA magnitude"),
    (r".*\.lora_B\.bias", "lora_bias", "is a bias on lora_B"),
    (r".*\.lora_embedding_[AB]", "embedding_lora", "is LoRA on an embedding"),
    (r".*\.trainable_tokens_delta", "trainable_tokens", "replaces rows of the embedding"),
    (r".*\.lora_diag", "kasa", "belongs to KaSA"),
    (r".*\.bias", "bias", "would replace a bias of the base"),
    (r"(?!.*\.lora_).*\.weight", "base_weight", "would replace a weight of the shared base"),
)


@dataclass(frozen=True, slots=True)
class LoraKey:
    """A key that binds: the module's path in the base and which factor it is."""

    path: str
    side: Side


class KeyReader:
    """Sorts keys into those that bind to a module of the base and faults that say why one does not."""

    def __init__(self, module_paths: Iterable[str], faults: FaultList, *, has_velora: bool = False) -> None:
        self._paths = frozenset(module_paths)
        self._faults = faults
        self._has_velora = has_velora
        self._by_suffix = {
            suffix: path
            for path in self._paths
            for suffix in dotted_suffixes(path)
            if any(part.isdigit() for part in suffix.split("."))
        }

    def read(self, key: str) -> LoraKey | None:
        """The bound key; None after adding a fault, and for a tensor that only training needs."""
        lora = _LORA.fullmatch(key)
        velora = _VELORA.fullmatch(key) if self._has_velora else None
        if velora is not None:
            if velora["path"].removeprefix(PREFIX) not in self._paths:
                self._refuse_path(key, velora["path"])
        elif lora is None:
            self._refuse_special(key)
        elif lora["path"].startswith(PREFIX) and lora["path"][len(PREFIX) :] in self._paths:
            return LoraKey(lora["path"][len(PREFIX) :], "A" if lora["side"] == "A" else "B")
        else:
            self._refuse_path(key, lora["path"])
        return None

    def _refuse_special(self, key: str) -> None:
        for pattern, code, what in _SPECIAL:
            if re.fullmatch(pattern, key):
                self._faults.add(code, f"the tensor {shown(key, 160)} {what}", field=key[:200])
                return
        self._faults.add("unexpected_tensor", f"the tensor {shown(key, 160)} belongs to no LoRA pair", field=key[:200])

    def _refuse_path(self, key: str, path: str) -> None:
        if "_orig_mod" in path.split("."):
            hint = "the base was compiled before it was wrapped; remove `_orig_mod.` from the tensor names"
            self._faults.add(
                "compiled_prefix", f"{shown(key, 160)} passes through `_orig_mod`", hint=hint, field=key[:200]
            )
        elif "experts" in path.split("."):
            hint = "neither per-expert nor fused expert LoRA is served; target attention and dense projections only"
            self._faults.add("expert_lora", f"{shown(key, 160)} is LoRA on an expert", hint=hint, field=key[:200])
        elif not self._refuse_prefix(key, path):
            self._refuse_module(key, path)

    def _refuse_prefix(self, key: str, path: str) -> bool:
        """Whether the end of `path` is a module of the base, so that only what stands before it is wrong."""
        for suffix in dotted_suffixes(path):
            known = self._by_suffix.get(suffix)
            if known is not None:
                found, wanted = path.removesuffix(suffix), PREFIX + known.removesuffix(suffix)
                self._faults.add(
                    "prefix",
                    f"{shown(key, 160)} begins with {shown(found)}; expected {shown(wanted)}",
                    hint="save the adapter with PEFT from the same class of model that is served",
                    field=key[:200],
                )
                return True
        return False

    def _refuse_module(self, key: str, path: str) -> None:
        module = path.removeprefix(PREFIX)
        if module.rpartition(".")[2] in ("lm_head", "embed_tokens", "wte", "embed_out"):
            message = f"{shown(key, 160)} is LoRA on the embedding or the head, which is not served"
            self._faults.add("embedding_lora", message, field=key[:200])
            return
        self._faults.add(
            "unknown_module",
            f"the base has no module {shown(module, 160)}",
            hint="the adapter was probably trained for another base",
            field=key[:200],
        )
