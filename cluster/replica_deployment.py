"""The replica's Serve deployment: a plain Replica with a life in the fleet around it.

The engine is imported when a replica starts, so that no other process of the fleet loads torch.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.channel import Batch, Outbox
from cluster.config import FleetConfig
from cluster.load_report import LoadReport
from cluster.member import Member, pulse_of
from cluster.registry_client import ServeRegistry
from cluster.replica_journal import ReplicaJournal
from cluster.serve_calls import MemberLost
from cluster.usage_teller import tell_forever, tell_last
from registry.errors import JoinRefused, RegistryError
from registry.usage_ledger import UsageLedger
from replica.config import ReplicaConfig
from replica.errors import EngineDead
from replica.messages import GenerateRequest, ReplicaStatus, SlotView
from telemetry.logs import set_up
from telemetry.traces import open_tracer

if TYPE_CHECKING:
    from replica.replica import Replica

logger = logging.getLogger("lorafleet.replica")
LEAVE_S = 2.0
"""How long a hung replica tries to tell the registry that it goes."""
ReplicaFactory = Callable[[ReplicaConfig, Any], "Replica"]


def torch_replica(config: ReplicaConfig, source: Any) -> "Replica":
    """The engine on transformers and torch."""
    from replica.replica import Replica

    return Replica(config, source, stall_s=config.stall_s)


class RegistrySource:
    """`replica.adapters.node_store.BlobSource` over the registry; called from load threads."""

    def __init__(self, registry: ServeRegistry, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._loop = loop

    def fetch(self, sha256: str, to: Path) -> None:
        """Write a blob to `to`. Raises OSError when the registry cannot deliver it."""
        future = asyncio.run_coroutine_threadsafe(self._registry.fetch_blob(sha256, to), self._loop)
        try:
            future.result()
        except RegistryError as error:
            raise OSError(f"blob {sha256[:12]}: {error.message}") from error


class ReplicaDeployment:
    """One base model in the fleet. Calls name it by `replica_id`, and one that is meant for another is refused.

    It has joined when `__init__` is over: a rolling update goes on to the next replica as soon as this one runs, and
    must not leave a fleet in which none takes requests.
    """

    async def __init__(  # type: ignore[misc]
        self, config: FleetConfig, replica_factory: ReplicaFactory = torch_replica
    ) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        registry = ServeRegistry(serve.get_deployment_handle("RegistryActor", app_name=config.registry_app))
        set_up(config.logs, role="replica", member=self._replica_id)
        self._registry = registry
        self._ledger = UsageLedger(self._replica_id)
        self._tracer = open_tracer(config.traces, role="replica", member=self._replica_id)
        journal = ReplicaJournal(self._replica_id, self._ledger, self._tracer)
        self._replica = replica_factory(config.replica, RegistrySource(registry, self._loop))
        self._replica.report_to(partial(self._on_loop, journal.ended), partial(self._on_loop, journal.preempted))
        spec = self._replica.load()
        self._outboxes: dict[str, Outbox] = {}
        self._member = Member(
            self._replica_id,
            ray.get_runtime_context().get_node_id(),
            config.replica.adapters.max_slots,
            spec,
            self._replica.tokenizer_json,
            self._replica,
            registry,
            config.watch_timeout_s,
            config.replica.adapters.node_store_bytes,
            lambda: pulse_of(self._replica.status()),
        )
        self._replica.watch(self._member.readings)
        self._load_report = LoadReport()
        self._following = self._loop.create_task(self._member.run())
        self._telling = self._loop.create_task(tell_forever(self._ledger, registry))
        self._ending: asyncio.Task[None] | None = None
        await self._member.joined()

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """From the step thread; a loop that has ended takes nothing more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    async def check_health(self) -> None:
        """Serve replaces a replica whose step loop died or hangs, and shows why the fleet refuses a base."""
        if not self._replica.is_alive():
            if self._ending is None:
                self._ending = self._loop.create_task(self._end_process())
            raise EngineDead("the step loop makes no progress")
        if self._member.refusal is not None:
            raise JoinRefused(self._member.refusal)

    async def _end_process(self) -> None:
        """Leave the fleet and end: Serve would wait for requests that cannot end, and a replacement for the GPU."""
        logger.critical("the step loop makes no progress; the process ends")
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._member.leave()
        finally:
            os._exit(1)

    async def generate(self, request: GenerateRequest, gateway_id: str, replica_id: str) -> None:
        """Run a request to its end; its tokens travel on the gateway's channel. Cancelling the call aborts it."""
        self._check_target(replica_id)
        outbox = self._outbox(gateway_id)
        finished = outbox.open(request)
        try:
            self._replica.submit(request, outbox)
            await finished
        finally:
            outbox.close(request.request_id)
            if not finished.done() or finished.cancelled():
                self._replica.abort(request.request_id)

    async def tokens(self, gateway_id: str, replica_id: str) -> AsyncIterator[Batch]:
        """The gateway's channel: every step's chunks for all of its requests, until it has been idle for a while."""
        self._check_target(replica_id)
        async for batch in self._outbox(gateway_id).read():
            yield batch

    async def stop_choice(self, request_id: str, index: int, replica_id: str) -> None:
        self._check_target(replica_id)
        self._replica.abort(request_id, index)

    async def makes_progress(self, replica_id: str) -> bool:
        """Whether the step loop runs; a process that cannot answer says it too."""
        self._check_target(replica_id)
        return self._replica.is_alive()

    async def warm(self, digest: str, replica_id: str) -> None:
        """Bring a version to host memory ahead of its requests, where there is room."""
        self._check_target(replica_id)
        self._replica.warm(digest)

    async def metrics(self, replica_id: str) -> bytes:
        self._check_target(replica_id)
        return await asyncio.to_thread(self._replica.metrics)

    async def slots(self, replica_id: str) -> tuple[SlotView, ...]:
        """Who sits in which adapter slot at this moment."""
        self._check_target(replica_id)
        return self._replica.slots()

    async def status(self, replica_id: str) -> ReplicaStatus:
        self._check_target(replica_id)
        return self._replica.status()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `cluster.autoscaling` decides by; Serve asks from time to time when the fleet scales by itself."""
        return self._load_report.figures(self._replica.status())

    async def check_integrity(self, replica_id: str) -> None:
        self._check_target(replica_id)
        self._replica.check_integrity()

    async def process_id(self, replica_id: str) -> int:
        self._check_target(replica_id)
        return os.getpid()

    async def __del__(self) -> None:
        self._following.cancel()
        self._telling.cancel()
        await self._member.leave()
        await asyncio.to_thread(self._replica.close)  # load threads may wait for this very loop
        await tell_last(self._ledger, self._registry)
        await asyncio.to_thread(self._tracer.close)

    def _check_target(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise MemberLost(f"replica {replica_id} is gone; this is {self._replica_id}")

    def _outbox(self, gateway_id: str) -> Outbox:
        outbox = self._outboxes.get(gateway_id)
        if outbox is None:
            self._outboxes = {key: box for key, box in self._outboxes.items() if not box.is_abandoned}
            outbox = self._outboxes[gateway_id] = Outbox(
                self._loop, self._config.channel_linger_s, self._config.coalesce_s
            )
        return outbox
