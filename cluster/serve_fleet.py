"""The gateway's way to the replicas over Serve handles: one open call a request, one token channel a replica."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cluster.channel import Batch, Inbox, split_by_request
from cluster.running import RUNNING
from cluster.serve_calls import MemberLost, call, translate
from replica.messages import GenerateRequest, SlotView
from router.errors import ReplicaGone

ASK_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 5.0
PREFETCH_TIMEOUT_S = 5.0
START_POLL_S, START_POLLS = 0.02, 250
"""A replica joins the fleet just before Serve counts it as running, and calls for it reach it only then."""
DEPLOYMENT = "Replica"


class Channel:
    """The reading end of one replica's token channel; reopened on demand, since the replica closes it when idle."""

    def __init__(self, handle: Any, gateway_id: str, replica_id: str) -> None:
        self._handle = handle.options(stream=True)
        self._gateway_id = gateway_id
        self._replica_id = replica_id
        self.outbox_id = f"{gateway_id}/{uuid.uuid4().hex}"
        """Names the replica's end. A stream that was given up may still be read from there, so it is never shared."""
        self._inboxes: dict[str, Inbox] = {}
        self._reader: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Channel({self._replica_id}, open={len(self._inboxes)})"

    @property
    def is_idle(self) -> bool:
        return not self._inboxes

    def open(self, request: GenerateRequest) -> Inbox:
        inbox = self._inboxes[request.request_id] = Inbox(request.sampling.n)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())
        return inbox

    def close(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        """Read until the replica closes an idle channel; if requests are open by then, read on."""
        try:
            while True:
                stream = self._handle.tokens.remote(gateway_id=self.outbox_id, replica_id=self._replica_id)
                async for batch in stream:
                    self._deliver(batch)
                if not self._inboxes:
                    return
        except (Exception, asyncio.CancelledError) as error:
            # Serve cancels the stream of a replica that it stops; a shutdown of ours leaves no inbox to fail.
            gone = ReplicaGone(f"replica {self._replica_id} was lost: {translate(error)}")
            for inbox in self._inboxes.values():
                inbox.fail(gone)
            self.outbox_id = f"{self._gateway_id}/{uuid.uuid4().hex}"

    def _deliver(self, batch: Batch) -> None:
        for request_id, chunks in split_by_request(batch).items():
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.put(chunks)


class ServeFleet:
    """`router.gateway.Fleet` over the replicas' deployment handle."""

    def __init__(self, handle: Any, gateway_id: str, *, silence_s: float = 5.0, probe_timeout_s: float = 5.0) -> None:
        self._handle = handle
        self._gateway_id = gateway_id
        self._silence_s = silence_s
        self._probe_timeout_s = probe_timeout_s
        self._channels: dict[str, Channel] = {}
        self._replica_ids: frozenset[str] = frozenset()

    def _channel(self, replica_id: str) -> Channel:
        channel = self._channels.get(replica_id)
        if channel is None:
            channel = self._channels[replica_id] = Channel(self._handle, self._gateway_id, replica_id)
        return channel

    def follow(self, replica_ids: frozenset[str]) -> None:
        """Take the catalog's replicas; channels of those that left go once they carry nothing any more."""
        self._replica_ids = replica_ids
        for replica_id in self._channels.keys() - replica_ids:
            if self._channels[replica_id].is_idle:
                self._channels.pop(replica_id).shutdown()

    async def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Batch]:
        """Chunks of one request. Closing the iterator cancels the call, and the replica aborts the request.

        Raises ReplicaGone when the replica died, left or makes no progress, and ReplicaError subclasses as the replica
        raised them.
        """
        await self._started(replica_id)
        channel = self._channel(replica_id)
        outbox_id = channel.outbox_id
        response = self._handle.generate.remote(request=request, gateway_id=outbox_id, replica_id=replica_id)
        inbox = channel.open(request)
        life = asyncio.get_running_loop().create_task(self._follow(response, replica_id, inbox))
        try:
            while not inbox.is_finished or not inbox.is_empty:
                yield await self._next(inbox, replica_id)
        finally:
            channel.close(request.request_id)
            if not inbox.is_finished:
                response.cancel()
            life.cancel()

    async def _next(self, inbox: Inbox, replica_id: str) -> Batch:
        """The next chunks. A replica that is silent must prove that it makes progress, or ReplicaGone is raised."""
        while True:
            try:
                async with asyncio.timeout(self._silence_s) as silence:
                    return await inbox.get()
            except TimeoutError:
                if not silence.expired():
                    raise
            if not await self.makes_progress(replica_id) and inbox.is_empty:
                raise ReplicaGone(f"replica {replica_id} is silent and does not say that it makes progress")

    async def makes_progress(self, replica_id: str) -> bool:
        """Whether the replica says so, within `probe_timeout_s`."""
        response = self._handle.makes_progress.remote(replica_id=replica_id)
        try:
            return bool(await call(response, self._probe_timeout_s))
        except (MemberLost, TimeoutError):
            response.cancel()
            return False
        except asyncio.CancelledError:
            response.cancel()
            raise

    def gone(self) -> frozenset[str]:
        """Replicas of the catalog that Serve has stopped, or is stopping."""
        return RUNNING.gone(DEPLOYMENT, self._replica_ids)

    def starting(self) -> frozenset[str]:
        """Replicas of the catalog that Serve has yet to count as running."""
        return RUNNING.starting(DEPLOYMENT, self._replica_ids)

    async def _started(self, replica_id: str) -> None:
        """Wait until Serve's calls reach the replica, for START_POLLS at most."""
        for _ in range(START_POLLS):
            if not RUNNING.starting(DEPLOYMENT, (replica_id,)):
                return
            await asyncio.sleep(START_POLL_S)

    async def prefetch(self, replica_id: str, digest: str) -> None:
        """Bring a version to a replica's host memory, in vain where that is full.

        Raises ReplicaGone when the replica is, or does not answer within PREFETCH_TIMEOUT_S.
        """
        try:
            await call(self._handle.warm.remote(digest=digest, replica_id=replica_id), PREFETCH_TIMEOUT_S)
        except MemberLost as error:
            raise ReplicaGone(f"replica {replica_id} was lost: {error}") from error
        except TimeoutError as error:
            raise ReplicaGone(f"replica {replica_id} did not answer within {PREFETCH_TIMEOUT_S:g} s") from error

    async def _follow(self, response: Any, replica_id: str, inbox: Inbox) -> None:
        try:
            await call(response)
        except MemberLost as error:
            inbox.fail(ReplicaGone(f"replica {replica_id} was lost: {error}"))
        except Exception as error:
            inbox.fail(error)

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None:
        """End one choice of a request; a replica that is gone has ended it already."""
        response = self._handle.stop_choice.remote(request_id=request_id, index=index, replica_id=replica_id)
        with suppress(MemberLost, TimeoutError):
            await call(response, STOP_TIMEOUT_S)

    async def metrics(self) -> Mapping[str, bytes]:
        """Each replica's Prometheus text by replica id; those that do not answer in time are left out."""
        return await self._ask_all(self._handle.metrics)

    async def metrics_of(self, replica_id: str) -> bytes | None:
        """One replica's Prometheus text; None when it does not answer in time."""
        text: bytes | None = await self._ask(self._handle.metrics, replica_id)
        return text

    async def slots(self) -> Mapping[str, Sequence[SlotView]]:
        """Each replica's adapter slots by replica id; those that do not answer in time are left out."""
        return await self._ask_all(self._handle.slots)

    async def _ask_all(self, method: Any) -> dict[str, Any]:
        replica_ids = sorted(self._replica_ids)
        answers = await asyncio.gather(*(self._ask(method, replica_id) for replica_id in replica_ids))
        return {name: found for name, found in zip(replica_ids, answers, strict=True) if found is not None}

    async def _ask(self, method: Any, replica_id: str) -> Any:
        try:
            return await call(method.remote(replica_id=replica_id), ASK_TIMEOUT_S)
        except (MemberLost, TimeoutError):
            return None
