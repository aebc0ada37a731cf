"""The error tree of the gateway, and the one table from errors to HTTP.

RouterError
├── BadRequest               the request breaks a rule; `param` names the field
│   ├── ContextLengthExceeded    prompt + max_tokens do not fit the model's context
│   └── InvalidName              an adapter or alias name breaks the grammar
├── AuthenticationFailed     no key, or an unknown one
├── PermissionDenied         the key lacks the scope of the route
├── BodyTooLarge             the body or the upload is over the configured limit
├── BodyTimeout              the client did not send its body in time
├── HeadersTooLarge          path, query or headers are over the configured limit
├── TooManyRequests          the gateway's limit of concurrent requests is reached
│   └── TenantLimitReached       a limit of the tenant is reached; carries which, and when to try again
├── MemberNotFound           no gateway, replica or registry has that name
├── NoReplica                no replica has a live lease
├── GatewaySilent            another gateway does not answer, or nobody says which others there are
├── ReplicaGone              the replica died or cannot be reached
├── RequestAborted           the replica ended the request early (version withdrawn, shutdown)
└── RequestTimeout           the request took longer than `request_timeout_s`
"""

from dataclasses import dataclass

from registry import errors as registry_errors
from registry.errors import InvalidAdapter, RegistryError
from replica import errors as replica_errors
from replica.errors import ReplicaError


class RouterError(Exception):
    """Base of what the gateway refuses by itself."""

    code = "router_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


class BadRequest(RouterError):
    """`param` is the offending field as a path (`messages[0].role`), `code` OpenAI's machine-readable reason."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.param, self.code))


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class InvalidName(BadRequest):
    code = "invalid_name"


class AuthenticationFailed(RouterError):
    code = "invalid_api_key"


class PermissionDenied(RouterError):
    code = "permission_denied"


class BodyTooLarge(RouterError):
    code = "body_too_large"


class TooManyRequests(RouterError):
    code = "rate_limit_exceeded"


class BodyTimeout(RouterError):
    code = "body_timeout"


class HeadersTooLarge(RouterError):
    code = "headers_too_large"


class TenantLimitReached(TooManyRequests):
    """`limit` names the limit, as in `registry.types.TenantLimits`."""

    code = "tenant_limit_reached"

    def __init__(self, message: str, limit: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (TenantLimitReached, (self.message, self.limit, self.retry_after_s))


class MemberNotFound(RouterError):
    code = "member_not_found"


class GatewaySilent(RouterError):
    code = "gateway_silent"


class NoReplica(RouterError):
    code = "no_replica"


class ReplicaGone(RouterError):
    code = "replica_gone"


class RequestAborted(RouterError):
    code = "request_aborted"


class RequestTimeout(RouterError):
    code = "request_timeout"


@dataclass(frozen=True, slots=True)
class HttpFace:
    """How an error class looks over HTTP. `retry_after_s` becomes a Retry-After header."""

    status: int
    type: str
    retry_after_s: int | None = None


INVALID = "invalid_request_error"
SERVER = "server_error"

HTTP_FACES: dict[type[Exception], HttpFace] = {
    BadRequest: HttpFace(400, INVALID),
    AuthenticationFailed: HttpFace(401, "authentication_error"),
    PermissionDenied: HttpFace(403, "permission_error"),
    BodyTooLarge: HttpFace(413, INVALID),
    BodyTimeout: HttpFace(408, INVALID),
    HeadersTooLarge: HttpFace(431, INVALID),
    TooManyRequests: HttpFace(429, "rate_limit_error", 1),
    MemberNotFound: HttpFace(404, INVALID),
    GatewaySilent: HttpFace(503, SERVER, 1),
    NoReplica: HttpFace(503, SERVER, 1),
    ReplicaGone: HttpFace(503, SERVER, 1),
    RequestAborted: HttpFace(503, SERVER),
    RequestTimeout: HttpFace(504, SERVER),
    RouterError: HttpFace(500, SERVER),
    registry_errors.InvalidAdapter: HttpFace(400, INVALID),
    registry_errors.AdapterNotFound: HttpFace(404, INVALID),
    registry_errors.ModelNotFound: HttpFace(404, INVALID),
    registry_errors.Conflict: HttpFace(409, INVALID),
    registry_errors.NotReady: HttpFace(503, SERVER, 1),
    registry_errors.StagingFailed: HttpFace(502, SERVER),
    registry_errors.TenantNotFound: HttpFace(404, INVALID),
    registry_errors.KeyNotFound: HttpFace(404, INVALID),
    registry_errors.QuotaExceeded: HttpFace(429, "rate_limit_error", 60),
    registry_errors.LimitExceeded: HttpFace(413, INVALID),
    registry_errors.SourceRefused: HttpFace(400, INVALID),
    registry_errors.SourceNotFound: HttpFace(404, INVALID),
    registry_errors.SourceUnavailable: HttpFace(502, SERVER),
    registry_errors.BlobNotFound: HttpFace(404, INVALID),
    registry_errors.JoinRefused: HttpFace(409, INVALID),
    RegistryError: HttpFace(500, SERVER),
    replica_errors.InvalidRequest: HttpFace(400, INVALID),
    replica_errors.UnknownAdapter: HttpFace(503, SERVER, 1),
    replica_errors.AdapterUnavailable: HttpFace(503, SERVER, 1),
    replica_errors.AdapterWithdrawn: HttpFace(410, INVALID),
    replica_errors.AdapterTooLarge: HttpFace(400, INVALID),
    replica_errors.Overloaded: HttpFace(429, "rate_limit_error", 1),
    replica_errors.ReplicaDraining: HttpFace(503, SERVER, 1),
    replica_errors.EngineDead: HttpFace(503, SERVER, 1),
    replica_errors.OutOfMemory: HttpFace(503, SERVER),
    ReplicaError: HttpFace(500, SERVER),
}
"""The nearest class in an error's method resolution order decides; anything else is a 500 that tells nothing."""

UNEXPECTED = HttpFace(500, SERVER)


def http_face(error: BaseException) -> HttpFace:
    return next((HTTP_FACES[kind] for kind in type(error).__mro__ if kind in HTTP_FACES), UNEXPECTED)


def headers_of(error: BaseException) -> dict[str, str]:
    """Headers that go with an error's answer: when to try again, and how to say who one is."""
    headers: dict[str, str] = {}
    retry_after_s = getattr(error, "retry_after_s", None) or http_face(error).retry_after_s
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_code(error: BaseException) -> str:
    """The stable code of a known error, `internal_error` for anything else (its text may hold secrets)."""
    return str(error.code) if isinstance(error, RouterError | RegistryError | ReplicaError) else "internal_error"


def error_body(error: BaseException) -> dict[str, object]:
    """OpenAI's error object; an InvalidAdapter carries all its faults as well, a limit that was reached its name."""
    known = isinstance(error, RouterError | RegistryError | ReplicaError)
    fields: dict[str, object] = {
        "message": str(error) if known else "The server had an error while processing the request.",
        "type": http_face(error).type,
        "param": getattr(error, "param", None),
        "code": error_code(error),
    }
    if isinstance(error, registry_errors.ModelNotFound):
        fields["param"] = "model"
    if limit := getattr(error, "limit", None):
        fields["limit"] = limit
    if isinstance(error, InvalidAdapter):
        fields["faults"] = [fault.model_dump(mode="json") for fault in error.faults]
    return {"error": fields}
