"""What the control endpoints read from a path and a query, checked before anything is done with it."""

import re
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from registry.types import LIVE_ALIAS, is_adapter_name, is_alias_name, is_key_id
from router.errors import BadRequest, InvalidName

MAX_DIGITS = 12


def adapter_name(request: Request) -> str:
    """The path's adapter name; raises InvalidName."""
    return check_adapter_name(str(request.path_params["name"]))


def check_adapter_name(name: str) -> str:
    """Raises InvalidName for anything outside the grammar, path-like names above all."""
    if not is_adapter_name(name):
        raise InvalidName(
            f"adapter name {name[:80]!r} is not allowed; allowed: 1 to 64 letters, digits, '.', '_' and '-', "
            "a letter or digit at both ends, no '..'",
            "name",
        )
    return name


def alias_name(alias: str) -> str:
    if not is_alias_name(alias):
        raise InvalidName(
            f"alias {alias[:80]!r} is not allowed; allowed: 1 to 32 lower-case letters, digits, '_' and '-', "
            f"a letter first (the default alias is {LIVE_ALIAS!r})",
            "alias",
        )
    return alias


def version_number(request: Request) -> int:
    return digits(request.path_params["number"], "version")


def tenant_name(request: Request) -> str:
    """The path's tenant; raises InvalidName."""
    name = str(request.path_params["tenant"])
    if not is_adapter_name(name):
        raise InvalidName(f"tenant {name[:80]!r} is not allowed; the grammar is that of adapter names", "tenant")
    return name


def key_id(request: Request) -> str:
    """The path's key id. A whole key in its place, which is a secret, is not repeated in the error."""
    text = str(request.path_params["key_id"])
    if not is_key_id(text):
        raise InvalidName("a key is named by its id: 12 digits of 0-9 a-f, the middle part of the key", "key_id")
    return text


def digits(text: str, param: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise BadRequest(f"{param} is {text[:80]!r}; allowed: a whole number", param)
    return int(text)


def query_int(request: Request, param: str, default: int) -> int:
    text = request.query_params.get(param)
    return default if text is None else digits(text, param)


def query_seconds(request: Request, param: str) -> float:
    text = request.query_params.get(param, "0")
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII) is None:
        raise BadRequest(f"{param} is {text[:80]!r}; allowed: seconds, 0 or more", param)
    return float(text)


def query_known(request: Request, allowed: Collection[str]) -> None:
    """Raises BadRequest for a parameter that the route does not have."""
    for name in request.query_params:
        if name not in allowed:
            raise BadRequest(f"unknown parameter: '{name[:80]}'", name[:80], "unknown_parameter")


def query_time(request: Request, param: str) -> int | None:
    """A moment as seconds since the epoch: `2026-11-30`, `2026-11-30T05:00:00Z` (UTC unless it says otherwise), or
    those seconds. None when it is not there. Raises BadRequest."""
    text = request.query_params.get(param)
    if text is None or (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        return None if text is None else int(text)
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # a plus sign that was not escaped
        return int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp())
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{param} is {text[:80]!r}; allowed: 2026-11-30, 2026-11-30T05:00:00Z, seconds", param
        ) from None


def flags_of(given: Any, defaults: dict[str, bool]) -> dict[str, bool]:
    """Boolean parameters by name; raises BadRequest for unknown names and values."""
    flags = dict(defaults)
    for name, text in given.items():
        if name not in defaults:
            raise BadRequest(f"unknown parameter: '{name[:80]}'", name[:80], "unknown_parameter")
        if text not in ("true", "false"):
            raise BadRequest(f"{name} is {text[:80]!r}; allowed: 'true' or 'false'", name)
        flags[name] = text == "true"
    return flags
