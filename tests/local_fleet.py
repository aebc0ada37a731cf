"""The whole system in one process, without Ray: a registry, replicas and a gateway, wired as `cluster` wires them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from cluster.member import Member, pulse_of
from cluster.registry_metrics import RegistryMetrics
from cluster.replica_journal import ReplicaJournal
from cluster.usage_teller import tell
from registry.catalog import Catalog
from registry.config import RegistryConfig
from registry.pulse import FleetPulse, GatewayPulse, ReplicaPulse
from registry.pulse_board import PulseBoard
from registry.service import Registry
from registry.types import (
    AdapterManifest,
    AdapterRecord,
    BaseSpec,
    CatalogDelta,
    Preload,
    ReplicaRecord,
    ReplicaReport,
)
from registry.usage_ledger import UsageLedger
from registry.watch import Watch
from replica.config import ModelConfig, ReplicaConfig
from replica.messages import GenerateRequest, SlotView, TokenChunk
from replica.model.base_model import BaseModel
from replica.replica import Model, Replica
from router.app import create_app
from router.auth import KeyAuthenticator
from router.config import RouterConfig
from router.gateway import Gateway
from router.journal import Journal
from telemetry.traces import NoTraces, Tracer

PIECE_BYTES = 1 << 20


class LocalRegistry:
    """`router.gateway.RegistryClient` and `cluster.member.MemberRegistry` over a plain Registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.watcher = Watch(registry, poll_interval_s=0.1)
        self.board = PulseBoard()
        self._metrics = RegistryMetrics(registry.figures)

    async def _change(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = await asyncio.to_thread(getattr(self.registry, method), *args, **kwargs)
        await asyncio.to_thread(self.registry.advance)
        self.watcher.notify()
        return result

    async def push(self, name: str, files: Mapping[str, Path], *, owner: str, activate: bool) -> Any:
        return await self._change("push", name, files, owner=owner, activate=activate)

    async def adapters(self) -> Any:
        return await asyncio.to_thread(self.registry.adapters)

    async def adapter(self, name: str) -> Any:
        return await asyncio.to_thread(self.registry.adapter, name)

    async def replicas(self) -> Any:
        return await asyncio.to_thread(self.registry.replicas)

    async def manifest(self, digest: str) -> AdapterManifest:
        return await asyncio.to_thread(self.registry.manifest, digest)

    async def activate(self, name: str, alias: str, number: int, *, actor: str, expected_revision: Any = None) -> Any:
        return await self._change("activate", name, alias, number, actor=actor, expected_revision=expected_revision)

    async def rollback(self, name: str, alias: str, *, actor: str) -> Any:
        return await self._change("rollback", name, alias, actor=actor)

    async def canary(self, name: str, number: int, weight: float, **details: Any) -> Any:
        return await self._change("canary", name, number, weight, **details)

    async def promote(self, name: str, **details: Any) -> Any:
        return await self._change("promote", name, **details)

    async def halt(self, name: str, **details: Any) -> Any:
        return await self._change("halt", name, **details)

    async def remove_alias(self, name: str, alias: str, **details: Any) -> Any:
        return await self._change("remove_alias", name, alias, **details)

    async def push_source(self, name: str, source: Any, *, owner: str, activate: bool) -> Any:
        return await self._change("push_source", name, source, owner=owner, activate=activate)

    async def template(self) -> Any:
        return await asyncio.to_thread(self.registry.template)

    async def retire(self, name: str, number: int | None, *, actor: str, deadline_s: float | None = None) -> Any:
        return await self._change("retire", name, number, actor=actor, deadline_s=deadline_s)

    async def quarantine(self, name: str, number: int, *, actor: str, reason: str) -> Any:
        return await self._change("quarantine", name, number, actor=actor, reason=reason)

    async def collect(self, *, actor: str, dry_run: bool) -> Any:
        return await self._change("collect", actor=actor, dry_run=dry_run)

    async def version_states(self, name: str, number: int, unless: str | None, wait_s: float) -> Any:
        return await self.watcher.wait_states(name, number, unless, wait_s)

    async def audit(self, after: int, limit: int) -> Any:
        return await asyncio.to_thread(self.registry.audit, after, limit)

    async def tenants(self) -> Any:
        return await asyncio.to_thread(self.registry.tenants.every)

    async def tenant(self, name: str) -> Any:
        return await asyncio.to_thread(self.registry.tenants.one, name)

    async def add_tenant(self, name: str, limits: Any, *, actor: str) -> Any:
        return await self._change_tenants("add", name, limits, actor=actor)

    async def set_tenant(self, name: str, limits: Any, *, actor: str) -> Any:
        return await self._change_tenants("set_limits", name, limits, actor=actor)

    async def remove_tenant(self, name: str, *, actor: str) -> None:
        await self._change_tenants("remove", name, actor=actor)

    async def keys(self, tenant: str | None) -> Any:
        return await asyncio.to_thread(self.registry.tenants.keys, tenant)

    async def new_key(self, tenant: str, scopes: Any, **details: Any) -> Any:
        return await self._change_tenants("new_key", tenant, scopes, **details)

    async def rotate_key(self, key_id: str, **details: Any) -> Any:
        return await self._change_tenants("rotate_key", key_id, **details)

    async def revoke_key(self, key_id: str, *, actor: str) -> Any:
        return await self._change_tenants("revoke_key", key_id, actor=actor)

    async def access_of(self, name: str) -> Any:
        return await asyncio.to_thread(self.registry.tenants.access_of, name)

    async def pin(self, name: str, *, actor: str) -> AdapterRecord:
        return await self._change("pin", name, actor=actor)

    async def unpin(self, name: str, *, actor: str) -> AdapterRecord:
        return await self._change("unpin", name, actor=actor)

    async def set_preload(self, name: str, preload: Preload | None, *, actor: str) -> AdapterRecord:
        return await self._change("set_preload", name, preload, actor=actor)

    async def set_callers(self, name: str, callers: Any, *, actor: str) -> Any:
        return await self._change_tenants("set_callers", name, callers, actor=actor)

    async def _change_tenants(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = await asyncio.to_thread(getattr(self.registry.tenants, method), *args, **kwargs)
        self.watcher.notify()
        return result

    async def activation(self, activation_id: int) -> Any:
        return await asyncio.to_thread(self.registry.activation, activation_id)

    async def wait_activation(self, activation_id: int, timeout_s: float) -> Any:
        return await self.watcher.wait_activation(activation_id, timeout_s)

    async def events(self, after: int, limit: int, wait_s: float = 0.0) -> Any:
        return await self.watcher.wait_events(after, limit, wait_s)

    async def metrics(self) -> bytes:
        return await asyncio.to_thread(self._metrics.render)

    async def usage(self, **question: Any) -> Any:
        return await asyncio.to_thread(lambda: self.registry.usage.report(**question))

    async def take_usage(self, batch: Any) -> int:
        return await asyncio.to_thread(self.registry.usage.take, batch)

    async def read_blob(self, sha256: str) -> bytes:
        size = self.registry.blobs.size(sha256)
        return b"".join(self.registry.blobs.read(sha256, at, PIECE_BYTES) for at in range(0, size, PIECE_BYTES))

    def fetch(self, sha256: str, to: Path) -> None:
        """As `replica.adapters.node_store.BlobSource`."""
        to.write_bytes(self.registry.blobs.read(sha256, 0, self.registry.blobs.size(sha256)))

    async def store_blob(self, data: bytes) -> str:
        return await asyncio.to_thread(self.registry.blobs.put_bytes, data)

    async def publish_base(self, spec: BaseSpec) -> None:
        await self._change("publish_base", spec, actor="replica")

    async def changes(self, after_revision: int) -> CatalogDelta | None:
        return await asyncio.to_thread(self.registry.changes, after_revision)

    async def watch(self, after_revision: int, timeout_s: float) -> CatalogDelta | None:
        return await self.watcher.wait(after_revision, timeout_s)

    async def join_replica(
        self, replica_id: str, node_id: str, num_slots: int, base_digest: str, staged: tuple[str, ...]
    ) -> ReplicaRecord:
        record: ReplicaRecord = await self._change(
            "join_replica",
            replica_id=replica_id,
            node_id=node_id,
            num_slots=num_slots,
            base_digest=base_digest,
            staged=staged,
        )
        return record

    async def report_replica(self, report: ReplicaReport, pulse: ReplicaPulse | None = None) -> bool:
        if pulse is not None:
            self.board.hear_replica(report.replica_id, pulse)
        fields = report.model_dump(exclude={"replica_id"})
        return await self._change("renew_replica", report.replica_id, **fields) is not None

    async def leave_replica(self, replica_id: str) -> None:
        await self._change("leave_replica", replica_id)

    async def pulse_gateway(self, pulse: GatewayPulse) -> FleetPulse:
        if pulse.gone:
            await self._change("mark_leaving", pulse.gone)
        return self.board.exchange(pulse)


class LocalReplicas:
    """`router.gateway.Fleet` over replicas in this process."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas

    def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Sequence[TokenChunk]]:
        return self._replicas[replica_id].generate(request)

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None:
        self._replicas[replica_id].abort(request_id, index)

    async def makes_progress(self, replica_id: str) -> bool:
        return self._replicas[replica_id].is_alive()

    async def prefetch(self, replica_id: str, digest: str) -> None:
        self._replicas[replica_id].warm(digest)

    async def slots(self) -> Mapping[str, Sequence[SlotView]]:
        return {replica_id: replica.slots() for replica_id, replica in self._replicas.items()}

    async def metrics_of(self, replica_id: str) -> bytes | None:
        return self._replicas[replica_id].metrics()

    async def metrics(self) -> Mapping[str, bytes]:
        return {replica_id: replica.metrics() for replica_id, replica in self._replicas.items()}


class LocalPeers:
    """`router.gateway.Peers` of one of several gateways in this process."""

    def __init__(self, gateways: Sequence[Gateway], instance: str) -> None:
        self._gateways = gateways
        self._instance = instance

    def _others(self) -> list[Gateway]:
        return [gateway for gateway in self._gateways if gateway.config.instance != self._instance]

    async def names(self) -> Sequence[str]:
        return [gateway.config.instance for gateway in self._others()]

    async def metrics(self) -> Mapping[str, bytes]:
        return {gateway.config.instance: await gateway.own_exposition() for gateway in self._others()}

    async def metrics_of(self, instance: str) -> bytes | None:
        return (await self.metrics()).get(instance)


class LocalFleet:
    """Everything, running; `client` speaks HTTP to the gateway without a socket."""

    def __init__(self, registry: LocalRegistry, replicas: "JoinedReplicas", gateways: Sequence[Gateway]) -> None:
        gateway = gateways[0]
        self.registry = registry
        self.replicas: Mapping[str, Replica] = replicas.by_id
        self.gateway = gateway
        self.gateways = gateways
        self.app = create_app(gateway)
        self._joined = replicas

    async def add_replica(self) -> Replica:
        """Start one more and wait until the gateway places requests on it."""
        replica = await self._joined.start()
        await until(lambda: len(self.gateway.catalog.replicas) == len(self.replicas))
        return replica

    async def tell_usage(self) -> None:
        """Hand over what was used, as every member does from time to time."""
        for ledger in (*(gateway.journal.ledger for gateway in self.gateways), *self._joined.ledgers):
            await tell(ledger, self.registry)

    def client(self, gateway: Gateway | None = None) -> httpx.AsyncClient:
        """Of the first gateway, or of another one."""
        transport = httpx.ASGITransport(app=self.app if gateway is None else create_app(gateway))
        return httpx.AsyncClient(transport=transport, base_url="http://fleet", timeout=120)

    async def push(self, name: str, folder: Path) -> None:
        """Push an adapter folder and wait until it is live."""
        result = await self.registry.push(name, adapter_files(folder), owner="default", activate=True)
        activation = await self.registry.wait_activation(result.activation.activation_id, 30.0)
        assert activation.state in ("done", "flipped"), activation
        await until(lambda: self.gateway.catalog.revision >= activation.flipped_revision)

    def check_integrity(self) -> None:
        """Assert that every lease is back, everywhere."""
        for gateway in self.gateways:
            gateway.check_integrity()
            assert gateway.placement.num_leases == 0
        for replica in self.replicas.values():
            replica.check_integrity()


class JoinedReplicas:
    """Replicas with a member each, and a node store each under `folder`."""

    def __init__(
        self,
        folder: Path,
        config: ReplicaConfig,
        registry: LocalRegistry,
        model_loader: Callable[[ModelConfig], Model] = BaseModel.load,
        tracer: Tracer | None = None,
    ) -> None:
        self.by_id: dict[str, Replica] = {}
        self.ledgers: list[UsageLedger] = []
        self._tracer = tracer or NoTraces()
        self._model_loader = model_loader
        self._folder = folder
        self._config = config
        self._registry = registry
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Replica:
        """One more replica, loaded and on its way to join."""
        name = f"replica-{len(self.by_id)}"
        adapters = self._config.adapters.model_copy(update={"node_store": self._folder / f"node-{len(self.by_id)}"})
        config = self._config.model_copy(update={"adapters": adapters})
        replica = Replica(config, self._registry, model_loader=self._model_loader)
        self.ledgers.append(UsageLedger(name))
        journal = ReplicaJournal(name, self.ledgers[-1], self._tracer)
        soon = asyncio.get_running_loop().call_soon_threadsafe
        replica.report_to(partial(soon, journal.ended), partial(soon, journal.preempted))
        spec = await asyncio.to_thread(replica.load)
        self.by_id[name] = replica
        member = Member(
            name,
            "node",
            adapters.max_slots,
            spec,
            replica.tokenizer_json,
            replica,
            self._registry,
            watch_timeout_s=1.0,
            node_store_bytes=adapters.node_store_bytes,
            pulse=lambda: pulse_of(replica.status()),
        )
        replica.watch(member.readings)
        self._tasks.append(asyncio.create_task(member.run()))
        return replica

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.by_id.values():
            replica.close()


def adapter_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


async def until(question: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Seconds until `question` answered yes; TimeoutError when it never did."""
    started_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not question():  # noqa: ASYNC110 (the question is about other threads)
            await asyncio.sleep(0.005)
    return time.monotonic() - started_s


@asynccontextmanager
async def local_fleet(
    folder: Path,
    config: ReplicaConfig,
    *,
    num_replicas: int = 2,
    num_gateways: int = 1,
    router: RouterConfig | None = None,
    source_roots: Sequence[Path] = (),
    model_loader: Callable[[ModelConfig], Model] = BaseModel.load,
    with_keys: bool = False,
    tracer: Tracer | None = None,
) -> AsyncIterator[LocalFleet]:
    """A running fleet whose files lie under `folder`; each replica has a node store of its own.

    Everybody is one tenant, unless `with_keys` has callers known by their keys once there are any.
    """
    roots = tuple(map(str, source_roots))
    plain = Registry.open(RegistryConfig(data_dir=folder / "registry", source_roots=roots))
    registry = LocalRegistry(plain)
    replicas = JoinedReplicas(folder, config, registry, model_loader, tracer)
    for _ in range(num_replicas):
        base_id = (await replicas.start()).spec.base_id
    gateways: list[Gateway] = []

    def open_gateway(name: str) -> Gateway:
        catalog, config = Catalog((base_id,)), router or RouterConfig()
        return Gateway(
            config.model_copy(update={"instance": name}),
            catalog,
            LocalReplicas(replicas.by_id),
            registry,
            authenticator=KeyAuthenticator(lambda: catalog.access, open_without_keys=True) if with_keys else None,
            journal=Journal(UsageLedger(name), tracer),
            peers=LocalPeers(gateways, name),
        )

    gateways += [open_gateway(f"gateway-{number}" if number else "gateway") for number in range(num_gateways)]
    following = [asyncio.create_task(follow(gateway, registry)) for gateway in gateways]
    try:
        await until(lambda: all(len(gateway.catalog.replicas) == num_replicas for gateway in gateways))
        yield LocalFleet(registry, replicas, gateways)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await replicas.stop()
        plain.close()


async def follow(gateway: Gateway, registry: LocalRegistry) -> None:
    name = gateway.config.instance
    while True:
        delta = await registry.watcher.wait(gateway.catalog.revision, 1.0, with_access=True)
        await asyncio.to_thread(registry.registry.renew_gateway, name, gateway.catalog.revision)
        if delta is not None:
            await gateway.apply(delta)
            await registry._change("renew_gateway", name, gateway.catalog.revision)
