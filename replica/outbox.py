"""Chunks from the step thread to those that wait for them. Knows event loops, not engines."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from replica.errors import InvalidRequest
from replica.messages import TokenChunk

logger = logging.getLogger(__name__)


class Outbox(Protocol):
    """Where a request's tokens go. Called from the step thread, at most once a step; must not block or raise."""

    def put(self, chunks: Sequence[TokenChunk]) -> None: ...


class Outgoing:
    """The chunks of one step, gathered by outbox."""

    def __init__(self) -> None:
        self._by_outbox: dict[int, tuple[Outbox, list[TokenChunk]]] = {}

    def add(self, outbox: Outbox, chunk: TokenChunk) -> None:
        self._by_outbox.setdefault(id(outbox), (outbox, []))[1].append(chunk)

    def emit(self) -> bool:
        """Hand every outbox its chunks in one call; False when there were none."""
        gathered, self._by_outbox = self._by_outbox, {}
        for outbox, chunks in gathered.values():
            try:
                outbox.put(chunks)
            except Exception:
                logger.exception("an outbox refused %d chunks", len(chunks))
        return bool(gathered)


class LoopOutbox:
    """The streams that one event loop reads: a step wakes the loop once, however many of them it feeds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, asyncio.Queue[TokenChunk]] = {}

    def __repr__(self) -> str:
        return f"LoopOutbox(streams={len(self._streams)})"

    def open(self, request_id: str) -> "asyncio.Queue[TokenChunk]":
        """A queue that gets the chunks of `request_id` until `close`. Raises InvalidRequest if it has one."""
        if request_id in self._streams:
            raise InvalidRequest(f"request_id {request_id!r} is in use")
        return self._streams.setdefault(request_id, asyncio.Queue())

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        """Hand chunks to the loop, from any thread; a loop that has ended takes none."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, chunks)
        except RuntimeError:
            assert self._loop.is_closed()

    def _deliver(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is not None:
                stream.put_nowait(chunk)


async def take_all(stream: "asyncio.Queue[TokenChunk]") -> tuple[TokenChunk, ...]:
    """Wait for a chunk, then take what else has come meanwhile."""
    chunks = [await stream.get()]
    while not stream.empty():
        chunks.append(stream.get_nowait())
    return tuple(chunks)
