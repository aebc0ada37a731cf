"""Server-sent events and the responses that carry an answer: errors before the first byte keep their status, and a
client that leaves ends the work at once."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.errors import RequestTimeout, error_body, http_face

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

logger = logging.getLogger(__name__)


def to_json(value: object) -> bytes:
    """Compact JSON; refuses NaN and infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(value: object) -> bytes:
    """One SSE event with a JSON payload."""
    return b"data: " + to_json(value) + b"\n\n"


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` unless the client leaves first, which cancels it. Returns whether it ran to its end."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def within(timeout_s: float, work: Awaitable[None]) -> None:
    """Await `work`; raises RequestTimeout when it takes longer than `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RequestTimeout(f"the request took longer than {timeout_s:g} s") from error


class SlowClient(Exception):
    """The client has not read a piece of its stream for too long."""


class EventStream(Response):
    """Sends the byte strings of `events` as they come. An error after the first becomes an error event."""

    def __init__(self, events: AsyncGenerator[bytes, None], timeout_s: float, send_timeout_s: float) -> None:
        super().__init__(background=None)
        self._events = events
        self._timeout_s = timeout_s
        self._send_timeout_s = send_timeout_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, within(self._timeout_s, self._send_events(send)))
        except SlowClient:
            logger.info("stream of %s ended: its client does not read", scope["path"])
        except Exception as error:
            if not self._started:
                raise
            if http_face(error).status >= 500:
                logger.warning("stream of %s ended early: %r", scope["path"], error)
            await send({"type": "http.response.body", "body": event(error_body(error)) + DONE})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, message: Message) -> None:
        """Raises SlowClient for one that reads nothing: it shall hold no place on a replica."""
        try:
            async with asyncio.timeout(self._send_timeout_s) as deadline:
                await send(message)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SlowClient from error


class JsonAnswer(Response):
    """Sends what `answer` returns as JSON; the client's leaving cancels it."""

    def __init__(self, answer: Callable[[], Coroutine[Any, Any, object]], timeout_s: float) -> None:
        super().__init__(background=None)
        self._answer = answer
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""

        async def work() -> None:
            nonlocal body
            body = to_json(await self._answer())

        if await run_until_disconnect(receive, within(self._timeout_s, work())):
            await Response(body, media_type="application/json")(scope, receive, send)
