"""One token channel per gateway and replica: a message carries the new tokens of all of a gateway's streams.

A call that stays open per request carries its life (start, cancellation, failure); the tokens travel on the channel.
`Outbox` is the replica's end, `Inbox` the gateway's end for one request. See docs/decisions/0003-token-channel.md.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from replica.messages import GenerateRequest, TokenChunk

Batch = tuple[TokenChunk, ...]
UNREAD_S = 60.0
"""Chunks that nobody has come for in this time belong to a gateway that is gone."""


class Outbox:
    """Everything one replica has to say to one gateway, in order.

    A request's first tokens and its end go out at once; what comes between waits until `coalesce_s` have passed since
    the message before, and so shares its cost. `put` comes from the engine's thread, the rest runs on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, linger_s: float, coalesce_s: float) -> None:
        self._loop = loop
        self._linger_s = linger_s
        self._coalesce_s = coalesce_s
        self._pending: list[TokenChunk] = []
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        self._silent: set[str] = set()
        """Requests that have had no token yet."""
        self._open_choices: dict[str, int] = {}
        self._finished: dict[str, asyncio.Future[None]] = {}
        self._reader: object | None = None
        self._unread_since_s = loop.time()

    def __repr__(self) -> str:
        return f"Outbox(open={len(self._open_choices)}, pending={len(self._pending)}, read={self._reader is not None})"

    @property
    def is_idle(self) -> bool:
        return not self._open_choices and not self._pending

    @property
    def is_abandoned(self) -> bool:
        """Whether nothing is in flight and nobody reads: its gateway may be gone for good."""
        forgotten = self._loop.time() - self._unread_since_s > UNREAD_S
        return not self._open_choices and self._reader is None and (forgotten or not self._pending)

    def open(self, request: GenerateRequest) -> asyncio.Future[None]:
        """Expect a request's chunks; the future is done when the last choice has finished."""
        self._open_choices[request.request_id] = request.sampling.n
        self._silent.add(request.request_id)
        self._unread_since_s = self._loop.time()
        future = self._finished[request.request_id] = self._loop.create_future()
        return future

    def close(self, request_id: str) -> None:
        """Forget a request that ended or was abandoned; later chunks of it are dropped."""
        self._open_choices.pop(request_id, None)
        self._finished.pop(request_id, None)
        self._silent.discard(request_id)
        self._news.set()

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        self._loop.call_soon_threadsafe(self._append, chunks)

    def _append(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.request_id not in self._open_choices:
                continue
            self._pending.append(chunk)
            if chunk.request_id in self._silent:
                self._silent.discard(chunk.request_id)
                self._urgent.set()
            if chunk.finish_reason is not None:
                self._finish_choice(chunk.request_id)
                self._urgent.set()
        self._news.set()

    def _finish_choice(self, request_id: str) -> None:
        self._open_choices[request_id] -= 1
        future = self._finished[request_id]
        if self._open_choices[request_id] == 0 and not future.done():
            future.set_result(None)

    async def read(self) -> AsyncIterator[Batch]:
        """What accumulated since the last message, until nothing has been in flight for `linger_s`.

        A newer reader takes over from an older one (a gateway that reconnects).
        """
        reader = self._reader = object()
        self._news.set()
        self._urgent.set()
        sent_at_s = self._loop.time()
        try:
            yield ()
            while self._reader is reader:
                if not self._pending:
                    self._news.clear()
                    if not await wait_until_set(self._news, self._linger_s) and self.is_idle:
                        return
                else:
                    await self._wait_out(sent_at_s)
                    if self._reader is not reader:
                        return
                    batch, self._pending = merge_tokens(self._pending), []
                    self._urgent.clear()
                    sent_at_s = self._loop.time()
                    yield batch
        finally:
            if self._reader is reader:
                self._reader = None
                self._unread_since_s = self._loop.time()

    async def _wait_out(self, sent_at_s: float) -> None:
        """Let the rest of the coalescing time pass, unless something urgent is there or comes."""
        left_s = sent_at_s + self._coalesce_s - self._loop.time()
        if left_s > 0 and not self._urgent.is_set():
            await wait_until_set(self._urgent, left_s)


class Inbox:
    """One request's chunks on the gateway, or the error that ended it."""

    def __init__(self, num_choices: int) -> None:
        self._queue: asyncio.Queue[Batch | Exception] = asyncio.Queue()
        self._open_choices = num_choices

    @property
    def is_finished(self) -> bool:
        return self._open_choices == 0

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def put(self, chunks: Batch) -> None:
        self._open_choices -= sum(chunk.finish_reason is not None for chunk in chunks)
        self._queue.put_nowait(chunks)

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def get(self) -> Batch:
        """The next chunks, everything that is waiting at once; raises the error that ended the request."""
        item = await self._queue.get()
        while not isinstance(item, Exception) and not self._queue.empty():
            more = self._queue.get_nowait()
            if isinstance(more, Exception):
                self._queue.put_nowait(more)
                break
            item += more
        if isinstance(item, Exception):
            raise item
        return item


async def wait_until_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def merge_tokens(chunks: Sequence[TokenChunk]) -> Batch:
    """The same tokens with one chunk a choice, each where the choice's first chunk stood."""
    merged: dict[tuple[str, int], TokenChunk] = {}
    for chunk in chunks:
        key = (chunk.request_id, chunk.index)
        before = merged.get(key)
        merged[key] = chunk if before is None else join(before, chunk)
    return tuple(merged.values())


def join(before: TokenChunk, after: TokenChunk) -> TokenChunk:
    return TokenChunk(
        before.request_id,
        before.index,
        before.token_ids + after.token_ids,
        before.logprobs + after.logprobs,
        before.prompt_logprobs if after.prompt_logprobs is None else after.prompt_logprobs,
        after.finish_reason,
        after.error,
    )


def split_by_request(batch: Batch) -> dict[str, Batch]:
    """A step's chunks, by the request they belong to."""
    if len(batch) == 1:
        return {batch[0].request_id: batch}
    parts: dict[str, list[TokenChunk]] = {}
    for chunk in batch:
        parts.setdefault(chunk.request_id, []).append(chunk)
    return {request_id: tuple(chunks) for request_id, chunks in parts.items()}
