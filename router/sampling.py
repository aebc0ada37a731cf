"""From a checked request body to sampling parameters: the limits that depend on configuration or on the base."""

from collections.abc import Mapping

from registry.types import BaseSpec
from replica.messages import SamplingParams
from router.config import RequestLimits
from router.errors import BadRequest, ContextLengthExceeded
from router.schemas import ChatBody, CompletionBody, GenerationBody


def check_limits(body: GenerationBody, limits: RequestLimits) -> None:
    """Raise BadRequest for what this server's configuration does not allow."""
    _at_most("n", body.n, limits.max_n)
    if body.stop is not None:
        if len(body.stop) > limits.max_stop:
            raise BadRequest(f"stop has {len(body.stop)} strings; allowed: at most {limits.max_stop}", "stop")
        _at_most("stop", max(map(len, body.stop), default=0), limits.max_stop_chars, "characters in a stop string")
    _at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stop_token_ids, "token ids")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options is only allowed with stream=true", "stream_options")
    if isinstance(body, ChatBody):
        _check_chat(body, limits)
    elif isinstance(body, CompletionBody):
        _check_completion(body, limits)


def _check_chat(body: ChatBody, limits: RequestLimits) -> None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("max_tokens and max_completion_tokens are two names of one limit; send one", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs is only allowed with logprobs=true", "top_logprobs")
    _at_most("top_logprobs", body.top_logprobs, limits.max_logprobs)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise BadRequest(f"{name} is 0; allowed: at least 1", name)


def _check_completion(body: CompletionBody, limits: RequestLimits) -> None:
    _at_most("logprobs", body.logprobs, limits.max_logprobs)
    _at_most("prompt", len(body.prompt), limits.max_prompts, "prompts")
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens is 0; allowed: at least 1, or 0 with echo=true", "max_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest(
            f"best_of is {body.best_of}; allowed: the value of n, which is {body.n or 1}",
            "best_of",
            "unsupported_parameter",
        )


def _at_most(name: str, value: int | None, limit: int, what: str = "") -> None:
    if value is not None and value > limit:
        raise BadRequest(f"{name} is {value}; allowed: at most {limit} {what}".rstrip(), name)


def sampling_params(
    body: GenerationBody, num_prompt_tokens: int, base: BaseSpec, limits: RequestLimits
) -> SamplingParams:
    """Everything a replica needs to sample for one prompt; raises BadRequest and ContextLengthExceeded."""
    logprobs, prompt_logprobs = _logprobs(body)
    return SamplingParams(
        max_tokens=_max_tokens(body, num_prompt_tokens, base.context_length, limits.default_max_tokens),
        n=body.n or 1,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias or {}, base.vocab_size, limits.max_logit_bias),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], base.vocab_size),
        ignore_eos=bool(body.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logprobs(body: GenerationBody) -> tuple[int | None, int | None]:
    """How many alternatives to report for sampled tokens and, with `echo`, for the prompt's."""
    if isinstance(body, ChatBody):
        return ((body.top_logprobs or 0) if body.logprobs else None), None
    assert isinstance(body, CompletionBody)
    return body.logprobs, body.logprobs if body.echo else None


def _max_tokens(body: GenerationBody, num_prompt_tokens: int, context_length: int, default: int | None) -> int:
    asked = body.max_tokens
    if asked is None and isinstance(body, ChatBody):
        asked = body.max_completion_tokens
    room = context_length - num_prompt_tokens
    if room < (1 if asked is None else asked):
        raise ContextLengthExceeded(
            f"this model's context is {context_length} tokens; the prompt has {num_prompt_tokens}"
            + (f" and max_tokens asks for {asked}" if asked else "")
            + "; shorten the prompt or ask for fewer tokens",
            "messages" if isinstance(body, ChatBody) else "prompt",
        )
    if asked is not None:
        return asked
    return room if default is None else min(room, default)


def _logit_bias(bias: Mapping[str, float], vocab_size: int, max_entries: int) -> dict[int, float]:
    _at_most("logit_bias", len(bias), max_entries, "entries")
    checked = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise BadRequest(
                f"logit_bias has the key {key[:40]!r}; allowed: token ids from 0 to {vocab_size - 1}", "logit_bias"
            )
        checked[int(key)] = value
    return checked


def _stop_token_ids(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        check_token_id(token_id, vocab_size, "stop_token_ids")
    return tuple(token_ids)


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    """Raise BadRequest unless the id is inside the vocabulary."""
    if not 0 <= token_id < vocab_size:
        raise BadRequest(f"{param} has the token id {token_id}; allowed: 0 to {vocab_size - 1}", param)
