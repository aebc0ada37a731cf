"""Calls through Serve handles with Ray's wrapping taken off: our own errors come out as they went in."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from registry.errors import RegistryError
from replica.errors import ReplicaError

LOST = (RayError, RayServeException, ConnectionError, asyncio.CancelledError)
"""What Ray raises when the other side died, gave up or cannot be reached (a RayTaskError is looked into first)."""


class MemberLost(Exception):
    """The process at the other end of a call died, left, or cannot be reached."""


OURS = (RegistryError, ReplicaError, MemberLost)


def translate(error: BaseException) -> BaseException:
    """Our own error out of Ray's wrapping, MemberLost for a dead peer, anything else as it is."""
    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and isinstance(cause, BaseException):
        return translate(cause)
    if isinstance(error, OURS):
        return error
    if isinstance(error, LOST):
        return MemberLost(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return error


async def call(response: Awaitable[Any], timeout_s: float | None = None) -> Any:
    """Await one handle call. Raises our own errors, MemberLost, or TimeoutError.

    Serve hands on the CancelledError of the other side as it is: only where this task is being cancelled is it ours.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await response
    except TimeoutError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        translated = translate(error)
        if translated is error:
            raise
        raise translated from error
