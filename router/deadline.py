"""How long a request may take: what the fleet allows, or less where the client says so."""

import math
from collections.abc import Mapping

from router.errors import BadRequest

TIMEOUT_HEADER = "x-lorafleet-timeout-s"
"""Seconds after which the client wants no answer any more. Every retry happens within them."""


def timeout_of(headers: Mapping[str, str], limit_s: float) -> float:
    """The client's seconds, at most `limit_s`. Raises BadRequest when they are no number above 0."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return limit_s
    try:
        wanted_s = float(text)
    except ValueError:
        wanted_s = math.nan
    if not wanted_s > 0:
        raise BadRequest(f"{TIMEOUT_HEADER} is {text[:80]!r}; allowed: a number of seconds above 0", TIMEOUT_HEADER)
    return min(wanted_s, limit_s)
