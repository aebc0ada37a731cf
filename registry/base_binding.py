"""Whether an adapter belongs to the base that is served: what the upload says of its base, against what is known.

The name in `adapter_config.json` is advice, since training hosts write their own paths there; it is never opened. What
binds is a commit on both sides, and `lorafleet_base.json`, which `lorafleet template` has training scripts write.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from registry.adapter_config import AdapterConfig
from registry.faults import FaultList, shown
from registry.strict_json import StrictJsonError, parse
from registry.types import BaseBinding, BaseSpec, Record

VerifiedBy = Literal["digest", "revision", "name", "shapes"]
WRONG_BASE = "the adapter was trained on another base; train it on the one that is served"
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class BaseClaim(Record):
    """The content of `lorafleet_base.json`; what is null or absent is not claimed."""

    model_config = ConfigDict(strict=True)

    base_id: str | None = None
    revision: str | None = None
    digest: str | None = None
    tokenizer_sha256: str | None = None


def bind_base(
    adapter: AdapterConfig | None, claim_file: Path | None, base: BaseSpec, max_bytes: int, faults: FaultList
) -> BaseBinding:
    """What ties the upload to `base`; every contradiction is a fault."""
    claim = read_claim(claim_file, max_bytes, faults) if claim_file else BaseClaim()
    return binding(base, _Check(claim, adapter, base, faults).verified_by())


def binding(base: BaseSpec, verified_by: VerifiedBy) -> BaseBinding:
    return BaseBinding(
        base_id=base.base_id,
        revision=base.revision,
        digest=base.digest,
        tokenizer_sha256=base.tokenizer_sha256,
        vocab_size=base.vocab_size,
        verified_by=verified_by,
    )


def read_claim(path: Path, max_bytes: int, faults: FaultList) -> BaseClaim:
    """The file's claims; none, after adding a fault, when it cannot be read."""
    try:
        if path.stat().st_size > max_bytes:
            raise StrictJsonError(f"larger than {max_bytes} bytes")
        return BaseClaim.model_validate(parse(path.read_bytes()))
    except StrictJsonError as error:
        faults.add("base_claim", f"lorafleet_base.json: {error}", field="lorafleet_base.json")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        faults.add("base_claim", f"lorafleet_base.json: {where[:80]}: {first['msg']}", field="lorafleet_base.json")
    return BaseClaim()


class _Check:
    """One upload's word against one base."""

    def __init__(self, claim: BaseClaim, adapter: AdapterConfig | None, base: BaseSpec, faults: FaultList) -> None:
        self._claim = claim
        self._adapter_name = adapter.base_name if adapter else None
        self._revision = claim.revision or (adapter.revision if adapter else None)
        self._base = base
        self._faults = faults

    def verified_by(self) -> VerifiedBy:
        claim, base = self._claim, self._base
        self._compare("base_mismatch", "digest", "weights", claim.digest, base.digest)
        self._compare(
            "tokenizer_mismatch", "tokenizer_sha256", "tokenizer", claim.tokenizer_sha256, base.tokenizer_sha256
        )
        if claim.digest is not None:
            return "digest"
        named = self._claimed_name() or self._named()
        if not named:
            return "shapes"
        return "revision" if self._has_revision() else "name"

    def _compare(self, code: str, field: str, what: str, claimed: str | None, actual: str) -> None:
        if claimed is not None and claimed != actual:
            message = f"lorafleet_base.json names the {what} {shown(claimed)}; served is {actual!r}"
            self._faults.add(code, message, hint=WRONG_BASE, field=f"lorafleet_base.json:{field}")

    def _claimed_name(self) -> bool:
        claimed = self._claim.base_id
        if claimed is None or last_part(claimed) == last_part(self._base.base_id):
            return claimed is not None
        message = f"lorafleet_base.json names the base {shown(claimed)}; the base served is {shown(self._base.base_id)}"
        self._faults.add("base_mismatch", message, hint=WRONG_BASE, field="lorafleet_base.json:base_id")
        return False

    def _named(self) -> bool:
        """Whether the configuration names this base; another name is only worth a warning."""
        if self._adapter_name is None:
            return False
        if last_part(self._adapter_name) == last_part(self._base.base_id):
            return True
        self._faults.warn(
            "base_name",
            f"base_model_name_or_path is {shown(self._adapter_name)}; the base served is {shown(self._base.base_id)}",
            hint="shapes and modules fit, but check that the adapter was trained on this base",
            field="base_model_name_or_path",
        )
        return False

    def _has_revision(self) -> bool:
        """Whether both sides name the same revision. Two commits that differ are a fault; a branch says nothing."""
        ours, theirs = self._base.revision, self._revision
        if ours is None or theirs is None:
            return False
        if ours == theirs:
            return True
        if _COMMIT.fullmatch(ours) is None or _COMMIT.fullmatch(theirs) is None:
            return False
        if ours.startswith(theirs) or theirs.startswith(ours):
            return True
        message = f"the adapter was trained on revision {shown(theirs)} of the base; the one served is {shown(ours)}"
        self._faults.add("base_revision", message, hint=WRONG_BASE, field="revision")
        return False


def last_part(name: str) -> str:
    """The end of a hub id or path, in lower case."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
