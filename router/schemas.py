"""The request bodies of the OpenAI endpoints: strict types and fixed ranges, unknown fields refused.

Fields of OpenAI's that this server has no use for but that change nothing are accepted and ignored (`HARMLESS`).
Fields that would change the answer are typed `Unsupported` and refused unless they ask for nothing (`NEUTRAL`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, ValidationInfo
from pydantic_core import PydanticCustomError

from registry.types import Preload

INT64_MAX = 2**63 - 1

HARMLESS = (
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "parallel_tool_calls",
)
"""Accepted and ignored: they label a request, or ask for a place or a cache that makes no difference here."""


def _refuse_unless_neutral(value: Any, info: ValidationInfo) -> Any:
    neutral = NEUTRAL.get(info.field_name or "", ())
    if value is None or any(type(value) is type(each) and value == each for each in neutral):
        return value
    raise PydanticCustomError("unsupported", "not supported by this server")


_REFUSAL = BeforeValidator(_refuse_unless_neutral)

Unsupported = Annotated[Any, _REFUSAL]
"""A known field that must be null or ask for nothing."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_calls": ([],),
    "annotations": ([],),
    "suffix": ("",),
}
"""Values of unsupported fields, besides null, that ask for nothing."""


def _tell_neutral(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Of an unsupported field the JSON schema names the values that ask for nothing."""
    for name, field in model.model_fields.items():
        if _REFUSAL in field.metadata:
            schema["properties"][name] = {"enum": [None, *NEUTRAL.get(name, ())], "default": None}


class Body(BaseModel):
    """Strict (no coercion), and unknown fields are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_tell_neutral
    )


Natural = Annotated[int, Field(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
Revision = Natural
VersionNumber = Positive
Seconds = Annotated[float, Field(gt=0, le=1e10)]
"""A time to come: three centuries are for ever."""


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Stop = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[_Stop], BeforeValidator(_stop_list, json_schema_input_type=_Stop | list[_Stop])]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class GenerationBody(Body):
    """What both endpoints share. None means the client did not say; numeric ranges are OpenAI's, then vLLM's."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopStrings | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Logits are divided by it: near 0 nothing finite would be left."""
    logit_bias: dict[str, Bias] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None

    user: Annotated[StrictStr, Field(max_length=4096)] | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    store: Unsupported = None


def _joined_parts(value: Any) -> Any:
    """Content may be a list of text parts; their texts follow each other."""
    if not isinstance(value, list):
        return value
    if not value or not all(_is_text_part(part) for part in value):
        raise PydanticCustomError("content", 'a string, or a list of {"type": "text", "text": "..."} parts')
    return "".join(part["text"] for part in value)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


_Content = str | Annotated[list[TextPart], Field(min_length=1)]
Content = Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=_Content)]


class ChatMessage(Body):
    """One turn. `developer` is today's name of `system`; an assistant turn may carry the empty fields of an answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    refusal: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    annotations: Unsupported = None

    def for_template(self) -> dict[str, str]:
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    tools: Unsupported = None
    tool_choice: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    response_format: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


Prompt = str | tuple[int, ...]


def _prompt_list(value: Any) -> list[Prompt]:
    """One prompt or many, each text or token ids, as a list of prompts."""
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    return [_one_prompt(prompt) for prompt in prompts]


def _one_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and set(map(type, prompt)) == {int}:
        return tuple(prompt)
    raise PydanticCustomError("prompt", "a string, a list of strings, a list of token ids or a list of such lists")


_TokenIds = Annotated[list[TokenId], Field(min_length=1)]
_Prompts = str | _TokenIds | Annotated[list[str | _TokenIds], Field(min_length=1)]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_prompt_list, json_schema_input_type=_Prompts)]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Unsupported = None


class SourceBody(Body):
    """POST /v1/adapters/{name}/versions with a JSON body."""

    source: Annotated[str, Field(min_length=1, max_length=1024)]
    revision: Annotated[str, Field(max_length=64)] | None = None
    activate: bool = True
    wait: bool = True


class AliasBody(Body):
    """PUT /v1/adapters/{name}/aliases/{alias}."""

    version: VersionNumber
    expected_revision: Revision | None = None
    wait: bool = True


class RollbackBody(Body):
    """POST /v1/adapters/{name}/rollback."""

    alias: str = "live"
    wait: bool = True


class CanaryBody(Body):
    """POST /v1/adapters/{name}/canary."""

    version: VersionNumber
    weight: Annotated[float, Field(gt=0, le=1)]
    alias: str = "live"
    expected_revision: Revision | None = None
    wait: bool = True


class PromoteBody(Body):
    """POST /v1/adapters/{name}/promote."""

    alias: str = "live"
    expected_revision: Revision | None = None
    wait: bool = True


class HaltBody(Body):
    """POST /v1/adapters/{name}/halt."""

    alias: str = "live"
    expected_revision: Revision | None = None


class QuarantineBody(Body):
    """POST /v1/adapters/{name}/versions/{number}/quarantine."""

    reason: Annotated[str, Field(min_length=1, max_length=1000)]


class CollectBody(Body):
    """POST /v1/gc."""

    dry_run: bool = False


class CallersBody(Body):
    """PUT /v1/adapters/{name}/callers."""

    callers: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=1000)]


class PreloadBody(Preload):
    """PUT /v1/adapters/{name}/preload: every so many seconds, or each day at that time of UTC."""

    model_config = Body.model_config


class LimitsBody(Body):
    """PATCH /v1/tenants/{tenant}: what is named changes, null goes back to the configuration's default."""

    max_concurrent: Positive | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_adapters: Natural | None = None
    max_stored_bytes: Natural | None = None
    max_slots: Positive | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None


class TenantBody(LimitsBody):
    """POST /v1/tenants."""

    name: Annotated[str, Field(min_length=1, max_length=64)]


class KeyBody(Body):
    """POST /v1/tenants/{tenant}/keys."""

    scopes: Annotated[list[Literal["infer", "upload", "admin", "metrics"]], Field(min_length=1, max_length=8)]
    expires_in_s: Seconds | None = None
    note: Annotated[str, Field(max_length=200)] = ""


class RotateBody(Body):
    """POST /v1/keys/{key_id}/rotate."""

    overlap_s: Annotated[float, Field(ge=0, le=1e10)] = 86400.0
    expires_in_s: Seconds | None = None
