"""Log-probabilities in OpenAI's two schemas. JSON has no infinity, so the least is -9999."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from replica.messages import TokenLogprob
from router.choice import TokenEntry
from router.tokenizer import BaseTokenizer

LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """The log-probability as JSON can carry it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def chat_logprobs(tokenizer: BaseTokenizer, entries: Iterable[TokenEntry]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: BaseTokenizer, entry: TokenEntry) -> dict[str, Any]:
    assert entry.logprob is not None, "a sampled token without its log-probability"
    token = _chat_token(tokenizer, entry.token_id, entry.logprob.logprob)
    return token | {"top_logprobs": [_chat_token(tokenizer, *alternative) for alternative in entry.logprob.top]}


def _chat_token(tokenizer: BaseTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(tokenizer: BaseTokenizer, entries: Sequence[TokenEntry], num_top: int) -> dict[str, Any]:
    """The `logprobs` object of a completion choice: four lists of one length (`top_logprobs` null without any)."""
    return {
        "tokens": [tokenizer.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob.logprob) for entry in entries],
        "top_logprobs": [_top(tokenizer, entry.logprob) for entry in entries] if num_top else None,
        "text_offset": [entry.offset for entry in entries],
    }


def _top(tokenizer: BaseTokenizer, logprob: TokenLogprob | None) -> dict[str, float] | None:
    """Text -> log-probability of the most likely tokens and of the one that was taken."""
    if logprob is None:
        return None
    top = {tokenizer.token_text(token_id): finite(value) for token_id, value in logprob.top}
    return {tokenizer.token_text(logprob.token_id): finite(logprob.logprob)} | top
