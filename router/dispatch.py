"""One request on its way to a replica: placed, tried elsewhere while nothing was answered, aborted when closed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from replica.errors import EngineDead, Overloaded, ReplicaDraining, UnknownAdapter
from replica.messages import GenerateRequest, TokenChunk
from router.errors import NoReplica, ReplicaGone
from router.placement import Placement

RETRYABLE = (ReplicaGone, ReplicaDraining, EngineDead, Overloaded, UnknownAdapter)
"""Errors of one replica that another may not have; safe to retry while no token has been seen."""

LEAVING = (ReplicaGone, ReplicaDraining, EngineDead)
"""Errors that say the replica will not be back soon."""

Item = TypeVar("Item")


class Generator(Protocol):
    """What a dispatch needs of the fleet."""

    def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Sequence[TokenChunk]]: ...

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None: ...


@asynccontextmanager
async def closing(stream: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Close the iterator at the end, when it can be closed."""
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def _raise_retryable(chunks: Sequence[TokenChunk]) -> None:
    """A replica may also report its error in the first message."""
    for chunk in chunks:
        if isinstance(chunk.error, RETRYABLE):
            raise chunk.error


class Dispatch:
    """Streams one request's chunks from whichever replica takes it."""

    def __init__(
        self, placement: Placement, fleet: Generator, request: GenerateRequest, adapter_name: str | None, max_tries: int
    ):
        self._placement = placement
        self._fleet = fleet
        self._request = request
        self._adapter_name = adapter_name
        self._max_tries = max_tries
        self._replica_id: str | None = None

    async def chunks(self) -> AsyncIterator[Sequence[TokenChunk]]:
        """Messages of the replica, in order; closing the iterator aborts the request there.

        Raises the last replica's error when `max_tries` replicas failed before the first token, and a replica's
        error after it.
        """
        tried: dict[str, Exception] = {}
        while True:
            started = False
            try:
                with self._placement.place(self._adapter_name, tried) as lease:
                    self._replica_id = lease.replica_id
                    async with closing(self._fleet.generate(lease.replica_id, self._request)) as stream:
                        async for chunks in stream:
                            if not started:
                                _raise_retryable(chunks)
                            started = True
                            yield chunks
                    return
            except RETRYABLE as error:
                tried[lease.replica_id] = error
                if isinstance(error, LEAVING):
                    self._placement.suspect(lease.replica_id)
                if started or len(tried) >= self._max_tries:
                    raise
            except NoReplica:
                if tried:
                    raise list(tried.values())[-1] from None
                raise

    async def stop_choice(self, index: int) -> None:
        """Tell the replica that one of several choices is complete. A replica that is gone needs no telling."""
        if self._replica_id is None:
            return
        try:
            await self._fleet.stop_choice(self._replica_id, self._request.request_id, index)
        except ReplicaGone:
            return
