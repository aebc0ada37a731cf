"""Pure ASGI middleware: an id for every request, and no error without OpenAI's body."""

import logging
import re
import uuid
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import HeadersTooLarge, error_body, http_face

logger = logging.getLogger(__name__)
HEADER = b"x-request-id"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestId:
    """Answers with the client's `x-request-id`, or with a new one where it is missing or not sane.

    With `server_repeats`, what runs the application adds the id that it handed in to every answer by itself.
    """

    def __init__(self, app: ASGIApp, server_repeats: bool = False) -> None:
        self._app = app
        self._server_repeats = server_repeats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _given_id(scope)
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, request_id)]}
            await send(message)

        is_added = self._server_repeats and request_id == given
        await self._app(scope, receive, send if is_added else send_with_id)


def _given_id(scope: Scope) -> bytes:
    return next((value for name, value in scope["headers"] if name == HEADER), b"")


class HeaderLimit:
    """Refuses a path, query and headers that together are longer than any client of ours needs."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > self._max_bytes:
            error = HeadersTooLarge(f"path, query and headers are over {self._max_bytes} bytes, which is the limit")
            await JSONResponse(error_body(error), http_face(error).status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    line = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


class ErrorBoundary:
    """Turns an unexpected error into a 500 that tells the client nothing and the log everything."""

    def __init__(self, app: ASGIApp, answered_error: Callable[[str], None]) -> None:
        self._app = app
        self._answered_error = answered_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            request_id = scope.get("state", {}).get("request_id")
            logger.exception("request %s %s failed unexpectedly", request_id, scope.get("path"))
            if started or scope["type"] != "http":
                raise
            self._answered_error("internal_error")
            await JSONResponse(error_body(error), 500)(scope, receive, send)
