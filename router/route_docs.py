"""What each route takes and answers, in the words of the OpenAPI document. A route that is not here does not start."""

from collections.abc import Mapping
from typing import Any

from registry.pulse import ReplicaState
from registry.types import (
    ALIAS_PATTERN,
    KEY_ID_PATTERN,
    NAME_PATTERN,
    Activation,
    AdapterAccess,
    AdapterRecord,
    AuditPage,
    CollectReport,
    Event,
    FleetTemplate,
    KeyRecord,
    NewKey,
    PushResult,
    TenantRecord,
    VersionStates,
)
from router import answer_shapes as shapes
from router.deadline import TIMEOUT_HEADER
from router.fleet_api import MAX_SEARCH_CHARS
from router.openai_api import STICKY_HEADER
from router.openapi import JSON, About, Query, Schema, answers
from router.params import MAX_DIGITS
from router.schemas import (
    AliasBody,
    CallersBody,
    CanaryBody,
    ChatBody,
    CollectBody,
    CompletionBody,
    HaltBody,
    KeyBody,
    LimitsBody,
    PreloadBody,
    PromoteBody,
    QuarantineBody,
    RollbackBody,
    RotateBody,
    SourceBody,
    TenantBody,
)
from router.view.records import FleetReport
from router.vllm_api import LoadBody, UnloadBody

TEXT = "text/plain"
STREAM = "text/event-stream"
FORM = "multipart/form-data"

Docs = Mapping[tuple[str, str], About]

_number: Schema = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1}
_seconds: Schema = {"type": "number", "minimum": 0, "exclusiveMaximum": 10**9}
_text: Schema = {"type": "string"}
_flag: Schema = {"type": "string", "enum": ["true", "false"]}

PARAMETERS: Mapping[str, Schema] = {
    "name": {"type": "string", "pattern": NAME_PATTERN, "maxLength": 64},
    "tenant": {"type": "string", "pattern": NAME_PATTERN, "maxLength": 64},
    "alias": {"type": "string", "pattern": ALIAS_PATTERN, "maxLength": 32},
    "number": _number,
    "activation_id": _number,
    "key_id": {"type": "string", "pattern": KEY_ID_PATTERN},
    "model": {"type": "string", "minLength": 1},
    "file": {"type": "string", "minLength": 1},
}

_wait = Query("wait_s", _seconds, "wait so long, within `router.activation_wait_s`, for something to tell")
_page = (
    Query("after", _number, "the revision after which to begin"),
    Query("limit", _number, "the most entries"),
)
_inference: Mapping[str, Any] = {
    "headers": (
        Query(STICKY_HEADER, _text, "requests with one value get one version while a canary stands"),
        Query(TIMEOUT_HEADER, _seconds, "shortens the time that the request may take"),
    ),
    "errors": (400, 404, 410, 429, 502, 504),
}
_moving: Mapping[str, Any] = {"answers": answers(Activation), "errors": (409, 502)}
_vllm: Mapping[str, Any] = {
    "answers": {200: {TEXT: _text}},
    "errors": (404, 409, 429, 500, 502),
    "error_model": shapes.VllmErrorAnswer,
}
_adapter = "/v1/adapters/{name:path}"

_OPENAI: Docs = {
    ("GET", "/v1/models"): About(
        "The base and every alias that the caller may use", answers(shapes.ListOf[shapes.ModelEntry])
    ),
    ("GET", "/v1/models/{model:path}"): About("One model; `name@4` works as well", answers(shapes.ModelEntry)),
    ("POST", "/v1/chat/completions"): About(
        "Answer a chat",
        {200: {JSON: shapes.ChatCompletion, STREAM: _text}},
        body={JSON: ChatBody},
        **_inference,
    ),
    ("POST", "/v1/completions"): About(
        "Complete a text",
        {200: {JSON: shapes.TextCompletion, STREAM: _text}},
        body={JSON: CompletionBody},
        **_inference,
    ),
}

_ADAPTERS: Docs = {
    ("GET", "/v1/adapters"): About("Every adapter that the caller may call", answers(shapes.ListOf[AdapterRecord])),
    ("GET", _adapter): About("One adapter with its versions and aliases", answers(AdapterRecord)),
    ("DELETE", _adapter): About(
        "Retire an adapter: all its versions and aliases",
        answers(AdapterRecord),
        query=(Query("deadline_s", _seconds, "how long requests that run may go on"),),
        errors=(409,),
    ),
    ("POST", f"{_adapter}/versions"): About(
        "Upload a version, and make it `live` unless told otherwise",
        {200: {JSON: PushResult}, 201: {JSON: PushResult}},
        body={JSON: SourceBody, FORM: shapes.UploadForm},
        query=(
            Query("activate", _flag, "whether `live` moves to it (of a multipart upload)"),
            Query("wait", _flag, "whether the answer waits for that (of a multipart upload)"),
        ),
        errors=(409, 429, 502),
    ),
    ("GET", f"{_adapter}/versions/{{number}}"): About("One version and its manifest", answers(shapes.VersionDetail)),
    ("DELETE", f"{_adapter}/versions/{{number}}"): About(
        "Retire a version",
        answers(AdapterRecord),
        query=(Query("deadline_s", _seconds, "how long requests that run may go on"),),
        errors=(409,),
    ),
    ("GET", f"{_adapter}/versions/{{number}}/replicas"): About(
        "What every replica has of a version",
        answers(VersionStates),
        query=(_wait, Query("unless", _text, "wait for another etag than this one")),
    ),
    ("POST", f"{_adapter}/versions/{{number}}/quarantine"): About(
        "Stop serving a version's content everywhere",
        answers(AdapterRecord),
        body={JSON: QuarantineBody},
        errors=(409,),
    ),
    ("PUT", f"{_adapter}/aliases/{{alias}}"): About("Point an alias at a version", body={JSON: AliasBody}, **_moving),
    ("DELETE", f"{_adapter}/aliases/{{alias}}"): About(
        "Remove an alias",
        answers(AdapterRecord),
        query=(Query("expected_revision", _number, "refuse if the adapter has changed since"),),
        errors=(409,),
    ),
    ("POST", f"{_adapter}/canary"): About(
        "Send a share of an alias's requests to another version", body={JSON: CanaryBody}, **_moving
    ),
    ("POST", f"{_adapter}/promote"): About(
        "Point the alias at its canary", body={JSON: PromoteBody}, is_optional=True, **_moving
    ),
    ("POST", f"{_adapter}/halt"): About(
        "End the canary", answers(AdapterRecord), body={JSON: HaltBody}, is_optional=True, errors=(409,)
    ),
    ("POST", f"{_adapter}/rollback"): About(
        "Point an alias back to where it was", body={JSON: RollbackBody}, is_optional=True, **_moving
    ),
    ("PUT", f"{_adapter}/callers"): About(
        "Say who may call an adapter besides its owner", answers(AdapterAccess), body={JSON: CallersBody}
    ),
    ("PUT", f"{_adapter}/pin"): About(
        "Keep the adapter in a slot of every replica", answers(AdapterRecord), errors=(409,)
    ),
    ("DELETE", f"{_adapter}/pin"): About("Keep it no more", answers(AdapterRecord)),
    ("PUT", f"{_adapter}/preload"): About(
        "Bring the adapter to its homes by the clock", answers(AdapterRecord), body={JSON: PreloadBody}
    ),
    ("DELETE", f"{_adapter}/preload"): About("Bring it no more", answers(AdapterRecord)),
    ("GET", "/v1/template"): About("What adapters should look like", answers(FleetTemplate)),
    ("GET", "/v1/activations/{activation_id}"): About("How far an activation is", answers(Activation), query=(_wait,)),
    ("POST", "/v1/load_lora_adapter"): About("vLLM's load from a source", body={JSON: LoadBody}, **_vllm),
    ("POST", "/v1/unload_lora_adapter"): About("vLLM's unload", body={JSON: UnloadBody}, **_vllm),
}

_TENANTS: Docs = {
    ("GET", "/v1/tenants"): About("Every tenant", answers(shapes.ListOf[TenantRecord])),
    ("POST", "/v1/tenants"): About("Add a tenant", answers(TenantRecord, 201), body={JSON: TenantBody}, errors=(409,)),
    ("GET", "/v1/tenants/{tenant}"): About("One tenant", answers(TenantRecord)),
    ("PATCH", "/v1/tenants/{tenant}"): About(
        "Change the limits that the body names", answers(TenantRecord), body={JSON: LimitsBody}
    ),
    ("DELETE", "/v1/tenants/{tenant}"): About(
        "Remove a tenant and revoke its keys", answers(shapes.RemovedTenant), errors=(409,)
    ),
    ("POST", "/v1/tenants/{tenant}/keys"): About(
        "Make a key; the one answer that has its secret", answers(NewKey, 201), body={JSON: KeyBody}
    ),
    ("GET", "/v1/keys"): About(
        "Every key, without its secret",
        answers(shapes.ListOf[KeyRecord]),
        query=(Query("tenant", _text, "of one tenant alone"),),
    ),
    ("POST", "/v1/keys/{key_id}/rotate"): About(
        "Make a key's successor", answers(NewKey, 201), body={JSON: RotateBody}, is_optional=True, errors=(409,)
    ),
    ("DELETE", "/v1/keys/{key_id}"): About("Revoke a key", answers(KeyRecord)),
}

_FLEET: Docs = {
    ("GET", "/v1/replicas"): About("The replicas as they last reported", answers(shapes.ListOf[ReplicaState])),
    ("GET", "/v1/events"): About("The change log", answers(shapes.ListOf[Event]), query=(*_page, _wait)),
    ("GET", "/v1/audit"): About("The change log as a chain of hashes", answers(AuditPage), query=_page),
    ("POST", "/v1/gc"): About(
        "Collect versions and bytes", answers(CollectReport), body={JSON: CollectBody}, is_optional=True
    ),
    ("GET", "/v1/usage"): About(
        "What requests used",
        {200: {JSON: shapes.UsageAnswer, "text/csv": _text}},
        query=(
            Query("from", _text, "a day, a moment or seconds of the epoch"),
            Query("to", _text, "the like; hours that begin before it count"),
            Query("tenant", _text, "one tenant; another than the key's own needs `admin`"),
            Query("group_by", _text, "some of hour, day, tenant, adapter, version, with commas"),
            Query("format", {"type": "string", "enum": ["json", "csv"]}, "json unless told otherwise"),
        ),
    ),
    ("GET", "/v1/fleet"): About(
        "The fleet at a glance",
        answers(FleetReport),
        query=(
            Query("limit", _number, "the most adapters"),
            Query("search", {"type": "string", "maxLength": MAX_SEARCH_CHARS}, "in names and owners of adapters"),
            Query(
                "since", {**_seconds, "exclusiveMaximum": 10**10}, "leave out points of the history before this moment"
            ),
        ),
    ),
    ("GET", "/health"): About("Whether the process answers", answers(shapes.Health)),
    ("GET", "/ready"): About(
        "Whether a call to the base would be served", {200: {JSON: shapes.Ready}, 503: {JSON: shapes.Ready}}
    ),
    ("GET", "/metrics"): About(
        "Prometheus text of the fleet, or of one member",
        {200: {TEXT: _text}},
        query=(Query("instance", _text, "the member"),),
        errors=(404,),
    ),
    ("GET", "/metrics/targets"): About(
        "Every member, for Prometheus' `http_sd_configs`",
        {200: {JSON: {"type": "array", "items": shapes.ScrapeTarget.model_json_schema()}}},
    ),
    ("GET", "/openapi.json"): About("This document", answers(shapes.AnyObject)),
    ("GET", "/dashboard"): About("The dashboard", {200: {"text/html": _text}, 304: {}}),
    ("GET", "/dashboard/{file}"): About(
        "A file that the dashboard loads",
        {200: {"text/css": _text, "text/javascript": _text, "image/svg+xml": _text}, 304: {}},
    ),
}

DOCS: Docs = {**_OPENAI, **_ADAPTERS, **_TENANTS, **_FLEET}
