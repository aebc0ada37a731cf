"""What a request may ask of one replica; everything here is known before it is queued. Knows no state."""

import math
from dataclasses import dataclass

from replica.errors import InvalidRequest
from replica.messages import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The bounds that the base model and the KV cache set."""

    vocab_size: int
    context_length: int
    num_blocks: int
    block_size: int

    def check(self, request: GenerateRequest) -> None:
        """Raise InvalidRequest for a request that could never be served as it stands."""
        request.sampling.check(self.vocab_size)
        _check_numbers(request)
        self._check_prompt(request.prompt)
        self._check_length(request)

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = min(prompt) if min(prompt) < 0 else max(prompt)
            raise InvalidRequest(f"prompt token id {bad} is outside the vocabulary of {self.vocab_size}")

    def _check_length(self, request: GenerateRequest) -> None:
        num_prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        if num_prompt + max_tokens > self.context_length:
            raise InvalidRequest(
                f"prompt of {num_prompt} tokens plus max_tokens {max_tokens} is more than "
                f"the context length of {self.context_length}"
            )
        num_blocks = -(-(num_prompt + max(max_tokens - 1, 0)) // self.block_size)
        if num_blocks > self.num_blocks:
            raise InvalidRequest(
                f"prompt of {num_prompt} tokens plus max_tokens {max_tokens} needs {num_blocks} KV blocks of "
                f"{self.block_size} tokens; the cache has {self.num_blocks}"
            )


def _check_numbers(request: GenerateRequest) -> None:
    """What is outside SamplingParams.check: numbers that are not numbers, and the fields of the request itself."""
    sampling = request.sampling
    rules: tuple[tuple[str, object, bool, str], ...] = (
        ("weight", request.weight, 0 < request.weight < math.inf, "above 0"),
        ("spread", request.spread, request.spread >= 1, ">= 1"),
        ("max_slots", request.max_slots, request.max_slots is None or request.max_slots >= 1, ">= 1"),
        ("expected_tokens", request.expected_tokens, (request.expected_tokens or 0) >= 0, ">= 0"),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
        ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty), "finite"),
        ("logit_bias", dict(sampling.logit_bias), all(map(math.isfinite, sampling.logit_bias.values())), "finite"),
        *_count_rules(sampling),
    )
    for name, value, good, allowed in rules:
        if not good:
            raise InvalidRequest(f"{name} is {value}; allowed: {allowed}")


def _count_rules(sampling: SamplingParams) -> tuple[tuple[str, object, bool, str], ...]:
    return (
        ("logprobs", sampling.logprobs, (sampling.logprobs or 0) >= 0, ">= 0"),
        ("prompt_logprobs", sampling.prompt_logprobs, (sampling.prompt_logprobs or 0) >= 0, ">= 0"),
    )
