"""What crosses the boundary of a replica: token ids in, token ids out.

Plain frozen dataclasses, cheap to build and to pickle; validation is the gateway's (text, vocabulary, ranges) and the
replica's (`SamplingParams.check`, called on submission).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from replica.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch the filters off.

    `logprobs` None reports nothing, 0 the sampled token only, k the k most likely as well. `prompt_logprobs`
    likewise, for the prompt's own tokens (for `echo`). Choices of one request differ by `seed + index`.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming field, value and allowed range."""
        rules = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 0, ">= 0"),
            ("n", self.n, 1 <= self.n <= 128, "1 to 128"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, ">= 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0"),
        )
        for name, value, good, allowed in rules:
            if not good:
                raise InvalidRequest(f"{name} is {value}; allowed: {allowed}")
        for token_id in (*self.logit_bias, *self.stop_token_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from and which version it names, in the words of logs, traces and usage.

    The engine looks at none of it. `request_id` is the client's `x-request-id`, `traceparent` as W3C's Trace Context
    has it, None where nothing is traced. For the base `name` and `number` are None.
    """

    request_id: str = ""
    name: str | None = None
    number: int | None = None
    traceparent: str | None = None


UNKNOWN_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call. `adapter` is a version's digest, None for the base model. `prompt` holds token ids.

    `expected_tokens` is what fair queueing charges for output (defaults to `sampling.max_tokens`). `spread` is at how
    many replicas the tenant has requests just now, as far as the sender knows: its weight counts once in all.
    `max_slots` is of how many distinct adapters the tenant may have requests under way at one replica; more wait.
    """

    request_id: str
    tenant: str
    adapter: str | None
    prompt: tuple[int, ...]
    sampling: SamplingParams
    weight: float = 1.0
    expected_tokens: int | None = None
    spread: int = 1
    origin: Origin = UNKNOWN_ORIGIN
    max_slots: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token (natural log, over the raw distribution) and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one choice. The last chunk of a choice has a `finish_reason`; with "error", `error` says why.

    `prompt_logprobs` comes once, on the first chunk of choice 0 when it was asked for; its first entry is None.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None


SlotUse = Literal["free", "loading", "resident", "pinned"]


@dataclass(frozen=True, slots=True)
class SlotView:
    """One adapter slot at this moment: `digest` is None while it is free; `num_pins` requests keep it."""

    use: SlotUse
    digest: str | None = None
    num_pins: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica reports of itself; counts are of this moment."""

    num_waiting: int
    num_running: int
    num_loading: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_slots: int
    resident: tuple[str, ...]
    host_cached: tuple[str, ...]
    host_bytes: int
    arena_bytes: int
    arena_free_bytes: int
    num_steps: int
    num_adapter_loads: int
    num_slot_hits: int
    num_slot_misses: int
    num_evictions: int
