"""The Serve deployments: a replica and a gateway, each a plain class with a life in the fleet around it."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from cluster.channel import Batch, Outbox
from cluster.config import FleetConfig
from cluster.member import Member
from cluster.registry_client import ServeRegistry
from cluster.serve_calls import MemberLost
from cluster.serve_fleet import ServeFleet
from registry.catalog import Catalog
from registry.errors import RegistryError
from registry.types import AdapterManifest, CatalogDelta
from replica.config import ReplicaConfig
from replica.errors import EngineDead
from replica.messages import GenerateRequest, ReplicaStatus
from replica.replica import Replica
from router.app import create_app
from router.gateway import Gateway

logger = logging.getLogger("lorafleet")
RETRY_S = 0.5
ReplicaFactory = Callable[[ReplicaConfig, Any], Replica]


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
    """One base model in the fleet. Calls name it by `replica_id`, and one that is meant for another is refused."""

    def __init__(self, config: FleetConfig, replica_factory: ReplicaFactory = Replica) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        registry = ServeRegistry(serve.get_deployment_handle("RegistryActor", app_name=config.registry_app))
        self._replica = replica_factory(config.replica, RegistrySource(registry, self._loop))
        spec = self._replica.load()
        self._outboxes: dict[str, Outbox] = {}
        self._member = Member(
            self._replica_id,
            ray.get_runtime_context().get_node_id(),
            config.replica.adapters.max_slots,
            spec,
            self._replica.tokenizer_json,
            ReplicaStager(self._replica),
            registry,
            config.watch_timeout_s,
        )
        self._following = self._loop.create_task(self._member.run())

    def check_health(self) -> None:
        """Serve replaces a replica whose step loop died or hangs."""
        if not self._replica.is_alive():
            raise EngineDead("the step loop makes no progress")

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

    async def metrics(self, replica_id: str) -> bytes:
        self._check_target(replica_id)
        return self._replica.metrics()

    async def status(self, replica_id: str) -> ReplicaStatus:
        self._check_target(replica_id)
        return self._replica.status()

    async def check_integrity(self, replica_id: str) -> None:
        self._check_target(replica_id)
        self._replica.check_integrity()

    async def process_id(self, replica_id: str) -> int:
        self._check_target(replica_id)
        return os.getpid()

    async def __del__(self) -> None:
        self._following.cancel()
        await self._member.leave()
        self._replica.close()

    def _check_target(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise MemberLost(f"replica {replica_id} is gone; this is {self._replica_id}")

    def _outbox(self, gateway_id: str) -> Outbox:
        outbox = self._outboxes.get(gateway_id)
        if outbox is None:
            self._outboxes = {key: box for key, box in self._outboxes.items() if not box.is_abandoned}
            outbox = self._outboxes[gateway_id] = Outbox(self._loop, self._config.channel_linger_s)
        return outbox


class ReplicaStager:
    """`cluster.member.Stager` over a Replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def stage(self, manifest: AdapterManifest) -> None:
        await self._replica.stage(manifest)

    def forget(self, digest: str) -> None:
        self._replica.forget(digest)

    def staged(self) -> Sequence[str]:
        return self._replica.staged()

    def resident(self) -> Sequence[str]:
        return self._replica.status().resident


class GatewayDeployment:
    """The HTTP face. It follows the registry's catalog and serves on from the last one when the registry is down."""

    def __init__(self, config: FleetConfig, base_names: tuple[str, ...], replicas: Any) -> None:
        self._config = config
        self._gateway_id = serve.get_replica_context().replica_id.unique_id
        self._registry = ServeRegistry(serve.get_deployment_handle("RegistryActor", app_name=config.registry_app))
        self._fleet = ServeFleet(replicas, self._gateway_id)
        self._catalog = Catalog(base_names)
        self._gateway = Gateway(config.router, self._catalog, self._fleet, self._registry)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._gateway)

    async def _follow(self) -> None:
        """Keep the catalog current for ever; each call acknowledges what was applied before it."""
        while True:
            try:
                delta = await self._registry.follow_gateway(
                    self._gateway_id, self._catalog.revision, self._config.watch_timeout_s
                )
                if delta is not None:
                    await self._apply(delta)
            except RegistryError as error:
                logger.warning("catalog: %s; serving on from revision %d", error.message, self._catalog.revision)
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("the gateway could not apply a change; it asks again")
                await asyncio.sleep(RETRY_S)

    async def _apply(self, delta: CatalogDelta) -> None:
        await self._gateway.apply(delta)
        self._fleet.follow(frozenset(replica.replica_id for replica in self._catalog.replicas))

    def check_health(self) -> None:
        if self._following.done():
            raise RuntimeError("the gateway no longer follows the catalog")

    async def __del__(self) -> None:
        self._following.cancel()
        try:
            await self._registry.leave_gateway(self._gateway_id)
        except RegistryError as error:
            logger.warning("could not leave: %s", error.message)
