"""JSON as RFC 8259 means it: no NaN, no duplicate keys, no numbers that overflow, no lone surrogates."""

import json
import math
from typing import NoReturn

MAX_INT_DIGITS = 18


class StrictJsonError(ValueError):
    """The bytes are not JSON that every reader would understand in the same way."""


def parse(data: bytes) -> object:
    """Return the value in `data` (UTF-8), or raise StrictJsonError with a reason that a person can act upon."""
    try:
        text = data.decode("utf-8")
        value: object = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except StrictJsonError:
        raise
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise StrictJsonError("a string holds half of a surrogate pair") from error
    except RecursionError as error:
        raise StrictJsonError("nested too deeply") from error
    except ValueError as error:
        raise StrictJsonError(str(error)) from error
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise StrictJsonError(f"the key {twice[:80]!r} appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError(f"the number {text[:40]} is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise StrictJsonError(f"the number {text[:40]} is too large")
    return int(text)
