"""What the answers look like, for the OpenAPI document and for tests against it. Nothing here is used to serve.

Answers that are records of the registry are described by those records.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from registry.types import AdapterManifest, Fault, VersionRecord


class Shape(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


Item = TypeVar("Item")
Count = Annotated[int, Field(ge=0)]


class ListOf(Shape, Generic[Item]):
    object: Literal["list"]
    data: list[Item]


class ErrorObject(Shape):
    """`limit` names the limit that was reached, `faults` are those of an upload."""

    message: str
    type: str
    param: str | None
    code: str
    limit: str | None = None
    faults: list[Fault] | None = None


class ErrorAnswer(Shape):
    error: ErrorObject


class VllmErrorObject(Shape):
    """Of vLLM's endpoints: `code` is the status where vLLM's own errors are told."""

    message: str
    type: str
    param: str | None
    code: str | int
    limit: str | None = None
    faults: list[Fault] | None = None


class VllmErrorAnswer(Shape):
    error: VllmErrorObject


class Usage(Shape):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class TokenLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class SampledLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    content: list[SampledLogprob]
    refusal: None


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


FinishReason = Literal["stop", "length"]


class ChatChoice(Shape):
    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Shape):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class TextCompletion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelEntry(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    digest: str | None
    max_model_len: int | None
    resident_on: list[str]


class VersionDetail(Shape):
    version: VersionRecord
    manifest: AdapterManifest


class RemovedTenant(Shape):
    name: str
    removed: Literal[True]


class Health(Shape):
    status: Literal["ok"]


class Ready(Shape):
    """`error` is there when something is missing, with the status 503."""

    ready: bool
    missing: list[str]
    revision: int
    error: ErrorObject | None = None


class ScrapeTarget(Shape):
    targets: list[str]
    labels: dict[str, str]


class UsageLine(Shape):
    """The columns of the groups asked for, and the counts."""

    start: str | None = None
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None
    digest: str | None = None
    requests: Count
    prompt_tokens: Count
    output_tokens: Count
    device_s: float


class UsageAnswer(Shape):
    object: Literal["list"]
    from_s: int
    to_s: int
    group_by: list[str]
    data: list[UsageLine]


class AnyObject(BaseModel):
    """An object of no fixed fields."""

    model_config = ConfigDict(extra="allow")


class UploadForm(Shape):
    """The files of an adapter, or one archive with them, each as a part with its own file name; `activate` and `wait`
    are `true` or `false`."""

    files: Annotated[list[Annotated[Any, Field(json_schema_extra={"type": "string", "format": "binary"})]], Field()]
    activate: Literal["true", "false"] = "true"
    wait: Literal["true", "false"] = "true"
