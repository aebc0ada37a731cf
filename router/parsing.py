"""Request bodies from bytes to checked models: size limit, JSON, and pydantic's complaints in OpenAI's words."""

import asyncio
import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from router.config import RequestLimits
from router.errors import BadRequest, BodyTimeout, BodyTooLarge

Model = TypeVar("Model", bound=BaseModel)
MAX_SHOWN_CHARS = 60
MAX_SHOWN_FAULTS = 100

_CODES = {
    "json_invalid": "invalid_json",
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}


async def read_body(scope: Scope, receive: Receive, limits: RequestLimits) -> bytes:
    """The whole body; raises BodyTooLarge, BodyTimeout, and BadRequest for one of too many values."""
    try:
        async with asyncio.timeout(limits.body_timeout_s) as deadline:
            body = await _read(scope, receive, limits.max_body_bytes)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise BodyTimeout(f"the body did not arrive within {limits.body_timeout_s:g} s") from error
    if len(body) > limits.max_json_items and body.count(b",") > limits.max_json_items:
        raise BadRequest(f"the body has more than {limits.max_json_items} values, which is the limit")
    return body


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body; raises BodyTooLarge, at once when Content-Length already says so."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {int(declared)} bytes; allowed: at most {max_bytes}")
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes, which is the limit")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def parse_body(model: type[Model], body: bytes) -> Model:
    """The checked body; raises BadRequest that names the first offending field and tells about all of them."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error) from error


def _bad_request(error: ValidationError) -> BadRequest:
    if error.error_count() > MAX_SHOWN_FAULTS:  # to describe them costs far more than to find them
        return BadRequest(f"the body has {error.error_count()} faults, too many to list")
    details = error.errors(include_url=False)
    first = details[0]
    code = _CODES.get(first["type"], "invalid_type" if first["type"].endswith("_type") else "invalid_value")
    message = "; ".join(dict.fromkeys(_describe(detail) for detail in details))
    return BadRequest(message, _param(first), code)


def _param(detail: ErrorDetails) -> str | None:
    """`("messages", 0, "role")` as `messages[0].role`; None for a fault of the body as a whole."""
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def _describe(detail: ErrorDetails) -> str:
    param = _param(detail)
    match detail["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {detail['ctx']['error']}"
        case "missing":
            return f"missing required parameter: '{param}'"
        case "extra_forbidden":
            return f"unknown parameter: '{param}'"
        case "unsupported":
            return f"parameter '{param}' is not supported by this server"
    complaint = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{param or 'the body'} is {_shown(detail['input'])}; allowed: {complaint}"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
