"""Tokens in the tokenizer files of an upload: those that the base lacks are refused, since nothing could read them.

Trainers often save the base's tokenizer beside the adapter, so a file that says no more than the base is welcome.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from registry.adapter_files import ADDED_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from registry.errors import BlobNotFound
from registry.faults import FaultList, shown
from registry.strict_json import StrictJsonError, parse
from registry.types import BaseSpec

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
HINT = "an adapter cannot extend the vocabulary; train with the base's own tokenizer"


class BaseTokens(Protocol):
    def __call__(self, base: BaseSpec) -> Mapping[str, int] | None:
        """Every token of the base and its id; None when the tokenizer is not at hand."""
        ...


class Blobs(Protocol):
    def read(self, sha256: str, offset: int, length: int) -> bytes: ...

    def size(self, sha256: str) -> int: ...


class StoredBaseTokens:
    """`BaseTokens` from the blob that the base's record names, parsed once."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._known: tuple[str, Mapping[str, int] | None] | None = None

    def __call__(self, base: BaseSpec) -> Mapping[str, int] | None:
        known = self._known
        if known is None or known[0] != base.tokenizer_sha256:
            known = self._known = (base.tokenizer_sha256, self._read(base.tokenizer_sha256))
        return known[1]

    def _read(self, sha256: str) -> Mapping[str, int] | None:
        try:
            document = json.loads(self._blobs.read(sha256, 0, self._blobs.size(sha256)))
            return dict(_tokens_of(TOKENIZER_FILE, document))
        except (BlobNotFound, ValueError):
            return None


def no_base_tokens(base: BaseSpec) -> None:
    """`BaseTokens` of a base whose tokenizer nobody has: ids are checked against the size of the vocabulary."""


def check_tokenizer(files: Mapping[str, Path], base: BaseSpec, base_tokens: BaseTokens, faults: FaultList) -> None:
    """Fault every token in `files` (by name, of TOKENIZER_FILES) that the base does not have under the same id."""
    known = base_tokens(base) if files else None
    for name, path in files.items():
        code = "added_tokens" if name == ADDED_TOKENS_FILE else "tokenizer"
        try:
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                raise StrictJsonError(f"larger than {MAX_TOKENIZER_BYTES} bytes")
            tokens = list(_tokens_of(name, parse(path.read_bytes())))
        except StrictJsonError as error:
            faults.add(code, f"{name}: {error}", field=name)
            continue
        for token, token_id in tokens:
            _check_token(name, token, token_id, base, known, faults)


def _check_token(
    name: str, token: str, token_id: int, base: BaseSpec, known: Mapping[str, int] | None, faults: FaultList
) -> None:
    if not 0 <= token_id < base.vocab_size:
        message = f"{name}: {shown(token)} has id {token_id}; the base has {base.vocab_size} tokens"
        faults.add("added_tokens", message, hint=HINT, field=name)
    elif known is not None and known.get(token) != token_id:
        ours = f"gives it the id {known[token]}" if token in known else "does not have it"
        message = f"{name}: {shown(token)} has id {token_id}; the base's tokenizer {ours}"
        faults.add("added_tokens", message, hint=HINT, field=name)


def _tokens_of(name: str, document: object) -> Iterator[tuple[str, int]]:
    """Tokens and ids that the file of that name declares. Raises StrictJsonError for another shape."""
    if not isinstance(document, dict):
        raise StrictJsonError("not a JSON object")
    if name == ADDED_TOKENS_FILE:
        yield from _mapping(document, "not a map from tokens to ids")
    elif name == TOKENIZER_CONFIG_FILE:
        yield from _decoder(document.get("added_tokens_decoder") or {})
    else:
        yield from _vocabulary(document.get("model"))
        yield from _added(document.get("added_tokens") or [])


def _mapping(value: object, complaint: str) -> Iterator[tuple[str, int]]:
    if not isinstance(value, dict) or not all(type(token_id) is int for token_id in value.values()):
        raise StrictJsonError(complaint)
    yield from value.items()


def _decoder(value: object) -> Iterator[tuple[str, int]]:
    """`{"128000": {"content": "<s>", ...}}`"""
    if not isinstance(value, dict):
        raise StrictJsonError("added_tokens_decoder is not an object")
    for text, entry in value.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (text.isascii() and text.isdigit() and len(text) <= 9) or not isinstance(content, str):
            raise StrictJsonError("added_tokens_decoder is not a map from ids to tokens")
        yield content, int(text)


def _vocabulary(model: object) -> Iterator[tuple[str, int]]:
    """A map from tokens to ids, or Unigram's list of `[token, score]`."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        for token_id, entry in enumerate(vocab):
            if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
                raise StrictJsonError("model.vocab is not a list of tokens and scores")
            yield entry[0], token_id
        return
    yield from _mapping(vocab or {}, "model.vocab is not a map from tokens to ids")


def _added(value: object) -> Iterator[tuple[str, int]]:
    for entry in value if isinstance(value, list) else [None]:
        content, token_id = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(content, str) or type(token_id) is not int:
            raise StrictJsonError("added_tokens is not a list of tokens with their ids")
        yield content, token_id
