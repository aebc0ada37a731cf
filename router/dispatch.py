"""One request on its way to a replica: placed, tried elsewhere while nothing was answered, aborted when closed."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from replica.errors import EngineDead, Overloaded, ReplicaDraining, UnknownAdapter
from replica.messages import GenerateRequest, TokenChunk
from router.errors import NoReplica, ReplicaGone, error_code
from router.placement import Placement

RETRYABLE = (ReplicaGone, ReplicaDraining, EngineDead, Overloaded, UnknownAdapter)
"""Errors of one replica that another may not have; safe to retry while no token has been seen."""

LEAVING = (ReplicaGone, ReplicaDraining, EngineDead)
"""Errors that say the replica will not be back soon."""

Item = TypeVar("Item")
logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """A replica failed in the middle of a whole answer, of which the client has seen nothing."""


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
        self,
        placement: Placement,
        fleet: Generator,
        request: GenerateRequest,
        adapter_name: str | None,
        max_tries: int,
        *,
        is_whole: bool = False,
    ) -> None:
        self._placement = placement
        self._fleet = fleet
        self._request = request
        self._adapter_name = adapter_name
        self._max_tries = max_tries
        self._is_whole = is_whole
        self._tried: dict[str, Exception] = {}
        self._replica_id: str | None = None

    @property
    def replica_id(self) -> str | None:
        """The replica that was asked last."""
        return self._replica_id

    async def chunks(self) -> AsyncIterator[Sequence[TokenChunk]]:
        """Messages of the replica, in order; closing the iterator aborts the request there.

        Raises what `verdict` says when `max_tries` replicas failed before the first token, Interrupted when one failed
        after it and the answer is whole: the next call of `chunks` begins it anew elsewhere. Raises a replica's error
        after the first token of a stream, whose client has seen it.
        """
        while True:
            started = False
            try:
                with self._placement.place(self._adapter_name, self._tried, self._request.adapter) as lease:
                    self._replica_id = lease.replica_id
                    async with closing(self._stream(lease.replica_id)) as stream:
                        async for chunks in stream:
                            if self._is_whole or not started:
                                _raise_retryable(chunks)
                            if not started:
                                self._placement.trust(lease.replica_id)
                            started = True
                            yield chunks
                    return
            except RETRYABLE as error:
                self._failed(lease.replica_id, error)
                if started and not self._is_whole:
                    raise
                if len(self._tried) >= self._max_tries:
                    raise self._verdict() from None
                if started:
                    raise Interrupted from error
            except NoReplica:
                if self._tried:
                    raise self._verdict() from None
                raise

    async def _stream(self, replica_id: str) -> AsyncIterator[Sequence[TokenChunk]]:
        """The replica's messages, which is told at how many replicas the tenant has requests."""
        with self._placement.spread.at(self._request.tenant, replica_id) as spread:
            request = replace(self._request, spread=spread)
            async with closing(self._fleet.generate(replica_id, request)) as stream:
                async for chunks in stream:
                    yield chunks

    def _failed(self, replica_id: str, error: Exception) -> None:
        self._tried[replica_id] = error
        fields = {"request_id": self._request.origin.request_id, "replica": replica_id, "code": error_code(error)}
        logger.info("replica refused or failed", extra={"fields": fields})
        if isinstance(error, LEAVING):
            self._placement.suspect(replica_id)

    def _verdict(self) -> Exception:
        """The error to tell: that a replica is full rather than that another is gone, for that one is there."""
        errors = list(self._tried.values())
        return next((error for error in errors if isinstance(error, Overloaded)), errors[-1])

    async def stop_choice(self, index: int) -> None:
        """Tell the replica that one of several choices is complete. A replica that is gone needs no telling."""
        if self._replica_id is None:
            return
        try:
            await self._fleet.stop_choice(self._replica_id, self._request.request_id, index)
        except ReplicaGone:
            return
