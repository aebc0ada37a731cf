"""The identity of an adapter version: what it computes, not how its files are laid out."""

import hashlib
import json
from collections.abc import Iterable

from registry.types import ModuleLora, TensorInfo


def canonical_json(value: object) -> bytes:
    """One byte string a value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def adapter_digest(base_digest: str, modules: Iterable[ModuleLora]) -> str:
    """sha256 over the base's digest and, by module path, rank, alpha, scale and the bytes and dtype of A and B.

    Names of files, order of tensors and settings that change nothing at inference leave no trace in it.
    """
    content = {
        "base": base_digest,
        "modules": [
            {
                "path": module.path,
                "rank": module.rank,
                "alpha": float(module.alpha),
                "scale": float(module.scale),
                "a": _tensor(module.a, module.a_blocks),
                "b": _tensor(module.b, module.b_blocks),
            }
            for module in sorted(modules, key=lambda module: module.path)
        ],
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _tensor(tensor: TensorInfo, num_blocks: int) -> dict[str, str | int]:
    content: dict[str, str | int] = {"dtype": tensor.dtype, "sha256": tensor.sha256}
    return content if num_blocks == 1 else {**content, "blocks": num_blocks}
