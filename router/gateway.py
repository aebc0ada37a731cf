"""The gateway: one catalog, one tokenizer, one placement, and the way a call takes through them.

Knows nothing of HTTP (that is `app`) or of Ray (`cluster` wires a Fleet and a RegistryClient).
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from registry.catalog import Catalog
from registry.errors import NotReady, RegistryError, StagingFailed
from registry.pulse import FleetPulse, GatewayPulse
from registry.types import (
    LIVE_ALIAS,
    Activation,
    AdapterAccess,
    AdapterManifest,
    AdapterRecord,
    AdapterSource,
    AuditPage,
    BaseSpec,
    CatalogDelta,
    CollectReport,
    Event,
    FleetTemplate,
    KeyRecord,
    LimitShare,
    LimitUse,
    NewKey,
    Preload,
    PushResult,
    ReplicaRecord,
    Scope,
    TenantLimits,
    TenantRecord,
    VersionState,
    VersionStates,
)
from registry.usage_ledger import UsageLedger
from registry.usage_records import UsageGroup, UsageReport
from replica.messages import UNKNOWN_ORIGIN, GenerateRequest, Origin, SlotView, TokenChunk
from router.admission import Admission
from router.auth import Authenticator, OpenAuthenticator
from router.calls import Binding, Call, CallBuilder
from router.choice import Delta
from router.config import RouterConfig
from router.dispatch import Dispatch
from router.errors import MemberNotFound, ReplicaGone
from router.exposition import merge_expositions
from router.gateway_readings import GatewayReadings, versions_in_service
from router.journal import Arrival, Journal
from router.merge import merge
from router.metrics import GatewayMetrics
from router.output_history import OutputHistory
from router.placement import Placement
from router.prefetch import Prefetcher
from router.preload import PreloadClock
from router.prompt_run import PromptRun
from router.readiness import Readiness
from router.schemas import ChatBody, CompletionBody, GenerationBody
from router.tenant_limits import Charge, TenantGate
from router.tokenizer import BaseTokenizer

REGISTRY_INSTANCE = "registry"


class Fleet(Protocol):
    """The replicas, by id. Closing what `generate` returns aborts the request; replicas may raise ReplicaError
    subclasses, and a replica that cannot be reached is ReplicaGone."""

    def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Sequence[TokenChunk]]: ...

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None:
        """End one choice of a running request; the others go on."""
        ...

    async def metrics(self) -> Mapping[str, bytes]:
        """Instance -> Prometheus text; members that do not answer are left out."""
        ...

    async def metrics_of(self, replica_id: str) -> bytes | None:
        """One replica's Prometheus text; None when it does not answer."""
        ...

    async def slots(self) -> Mapping[str, Sequence[SlotView]]:
        """Replica id -> its adapter slots; replicas that do not answer are left out."""
        ...

    async def makes_progress(self, replica_id: str) -> bool:
        """Whether the replica answers and its step loop runs. Never raises for a replica that is gone."""
        ...

    async def prefetch(self, replica_id: str, digest: str) -> None:
        """Bring a version nearer to being served, ahead of its requests.

        Raises ReplicaGone when the replica is, or does not answer in time.
        """
        ...


class Peers(Protocol):
    """The other gateways of the fleet, by `instance`."""

    async def names(self) -> Sequence[str]:
        """All there are, whether they answer or not. Raises GatewaySilent when nobody says which."""
        ...

    async def metrics(self) -> Mapping[str, bytes]:
        """The Prometheus text of each that answers; never raises."""
        ...

    async def metrics_of(self, instance: str) -> bytes | None:
        """One's Prometheus text; None when there is none of this name. Raises GatewaySilent when it does not answer,
        or nobody says whether there is one."""
        ...


class NoPeers:
    """There is one gateway."""

    async def names(self) -> Sequence[str]:
        return ()

    async def metrics(self) -> Mapping[str, bytes]:
        return {}

    async def metrics_of(self, instance: str) -> bytes | None:
        return None


class PulseSource(Protocol):
    """Where a gateway tells its loads and hears the fleet's: the registry."""

    async def pulse_gateway(self, pulse: GatewayPulse) -> FleetPulse: ...


class TenantClient(Protocol):
    """Tenants, keys and access lists of the registry; every method may raise RegistryError subclasses."""

    async def tenants(self) -> Sequence[TenantRecord]: ...

    async def tenant(self, name: str) -> TenantRecord: ...

    async def add_tenant(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord: ...

    async def set_tenant(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord: ...

    async def remove_tenant(self, name: str, *, actor: str) -> None: ...

    async def keys(self, tenant: str | None) -> Sequence[KeyRecord]: ...

    async def new_key(
        self, tenant: str, scopes: Sequence[Scope], *, expires_at_s: float | None, note: str, actor: str
    ) -> NewKey: ...

    async def rotate_key(self, key_id: str, *, overlap_s: float, expires_at_s: float | None, actor: str) -> NewKey: ...

    async def revoke_key(self, key_id: str, *, actor: str) -> KeyRecord: ...

    async def access_of(self, name: str) -> AdapterAccess | None: ...

    async def set_callers(self, name: str, callers: Sequence[str], *, actor: str) -> AdapterAccess: ...


class LimitSharer(Protocol):
    """Where gateways agree on their parts of tenants' limits."""

    async def share_limits(
        self, gateway_id: str, number: int, uses: Sequence[LimitUse], used_keys: Sequence[str]
    ) -> Sequence[LimitShare] | None: ...


class RegistryClient(TenantClient, Protocol):
    """The registry's service as the gateway calls it; every method may raise RegistryError subclasses."""

    async def push(self, name: str, files: Mapping[str, Path], *, owner: str, activate: bool) -> PushResult: ...

    async def push_source(self, name: str, source: AdapterSource, *, owner: str, activate: bool) -> PushResult: ...

    async def template(self) -> FleetTemplate: ...

    async def adapters(self) -> Sequence[AdapterRecord]: ...

    async def adapter(self, name: str) -> AdapterRecord: ...

    async def replicas(self) -> Sequence[ReplicaRecord]: ...

    async def manifest(self, digest: str) -> AdapterManifest: ...

    async def activate(
        self, name: str, alias: str, number: int, *, actor: str, expected_revision: int | None = None
    ) -> Activation: ...

    async def rollback(self, name: str, alias: str, *, actor: str) -> Activation: ...

    async def canary(
        self, name: str, number: int, weight: float, *, alias: str, actor: str, expected_revision: int | None = None
    ) -> Activation: ...

    async def promote(
        self, name: str, *, alias: str, actor: str, expected_revision: int | None = None
    ) -> Activation: ...

    async def halt(
        self, name: str, *, alias: str, actor: str, expected_revision: int | None = None
    ) -> AdapterRecord: ...

    async def remove_alias(
        self, name: str, alias: str, *, actor: str, expected_revision: int | None = None
    ) -> AdapterRecord: ...

    async def retire(
        self, name: str, number: int | None, *, actor: str, deadline_s: float | None = None
    ) -> AdapterRecord: ...

    async def quarantine(self, name: str, number: int, *, actor: str, reason: str) -> AdapterRecord: ...

    async def collect(self, *, actor: str, dry_run: bool) -> CollectReport: ...

    async def pin(self, name: str, *, actor: str) -> AdapterRecord: ...

    async def unpin(self, name: str, *, actor: str) -> AdapterRecord: ...

    async def set_preload(self, name: str, preload: Preload | None, *, actor: str) -> AdapterRecord: ...

    async def version_states(self, name: str, number: int, unless: str | None, wait_s: float) -> VersionStates:
        """Where a version is; waits up to `wait_s` for states whose etag is not `unless`."""
        ...

    async def audit(self, after: int, limit: int) -> AuditPage: ...

    async def usage(
        self, *, from_s: int | None, to_s: int | None, tenant: str | None, group_by: Sequence[UsageGroup]
    ) -> UsageReport:
        """Sums of use over the hours that begin in [from_s, to_s), of one tenant or all."""
        ...

    async def activation(self, activation_id: int) -> Activation: ...

    async def wait_activation(self, activation_id: int, timeout_s: float) -> Activation: ...

    async def events(self, after: int, limit: int, wait_s: float = 0.0) -> Sequence[Event]:
        """Changes after a revision; waits up to `wait_s` for the first of them."""
        ...

    async def read_blob(self, sha256: str) -> bytes: ...

    async def metrics(self) -> bytes:
        """The registry's Prometheus text."""
        ...


class Gateway:
    """Serves calls from the last catalog it was given. `apply` follows the registry."""

    def __init__(
        self,
        config: RouterConfig,
        catalog: Catalog,
        fleet: Fleet,
        registry: RegistryClient,
        *,
        authenticator: Authenticator | None = None,
        shares_limits: bool = False,
        metrics: GatewayMetrics | None = None,
        journal: Journal | None = None,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.catalog = catalog
        self.registry = registry
        self.authenticator = authenticator or OpenAuthenticator()
        self.metrics = metrics or GatewayMetrics(clock, config.metrics)
        self.placement = Placement(config.placement, self.metrics.placed, clock)
        self.metrics.watch(GatewayReadings(catalog, self.placement, config.metrics.max_adapters))
        self.admission = Admission(config.requests.max_concurrent_requests)
        self.limits = TenantGate(
            lambda: catalog.access, shared=shares_limits, refused=self.metrics.limited, clock=clock
        )
        self.outputs = OutputHistory()
        self._builder = CallBuilder(config.requests)
        self.journal = journal or Journal(UsageLedger(config.instance, wall_clock), clock=clock, wall_clock=wall_clock)
        self._fleet = fleet
        self._readiness = Readiness(fleet, clock)
        self._prefetcher = Prefetcher(fleet)
        self._preloads = PreloadClock()
        self._scheduled: tuple[AdapterRecord, ...] = ()
        self._peers = peers or NoPeers()
        self._wall_clock = wall_clock
        self._tokenizer: BaseTokenizer | None = None
        self._applying = asyncio.Lock()
        self._num_shares = 0
        self._untold_keys: set[str] = set()
        self._used: set[str] = set()

    def __repr__(self) -> str:
        return f"Gateway(revision {self.catalog.revision}, {self.admission!r}, {self.placement!r})"

    async def apply(self, delta: CatalogDelta) -> None:
        """Follow the catalog. When the tokenizer cannot be fetched this raises and changes nothing, so the same
        delta can be applied again."""
        async with self._applying:
            tokenizer = await self._tokenizer_for(delta.base)
            before = self.catalog.access
            if not self.catalog.apply(delta):
                return
            self._tokenizer = tokenizer
            names = [adapter.name for adapter in self.catalog.adapters if _is_served(adapter)]
            self.placement.update(names, self.catalog.replicas)
            self._scheduled = tuple(adapter for adapter in self.catalog.adapters if adapter.preload is not None)
            self.metrics.keep_only({key for _, key in versions_in_service(self.catalog.adapters)})
            if delta.access is not None:
                self.limits.keep_only(delta.access.limits)
                self.metrics.drop_tenants(() if before is None else before.limits.keys() - delta.access.limits)

    async def _tokenizer_for(self, base: BaseSpec | None) -> BaseTokenizer | None:
        current = self._tokenizer
        if base is None or (current is not None and current.base == base):
            return current if base is not None else None
        blob = await self.registry.read_blob(base.tokenizer_sha256)
        if hashlib.sha256(blob).hexdigest() != base.tokenizer_sha256:
            raise StagingFailed(f"the tokenizer's bytes do not match their digest {base.tokenizer_sha256[:12]}")
        return await asyncio.to_thread(BaseTokenizer, blob.decode(), base)

    def missing(self) -> list[str]:
        """What the catalog lacks to serve by; see `unready` for whether replicas do."""
        parts = {
            "base": self.catalog.base,
            "tokenizer": self._tokenizer,
            "replica": self.catalog.replicas,
        }
        return [name for name, part in parts.items() if not part]

    async def unready(self) -> list[str]:
        """What the fleet waits for before it can serve; empty when a replica says that it makes progress."""
        missing = self.missing()
        if "replica" not in missing:
            replica_ids = tuple(replica.replica_id for replica in self.catalog.replicas)
            missing += [] if await self._readiness.has_progress(replica_ids) else ["replica"]
        return missing

    async def chat_call(self, tenant: str, body: ChatBody, sticky: str | None = None) -> Call:
        """`sticky` is the client's own key for canaries. Raises NotReady, ModelNotFound, BadRequest."""
        binding = self._bind(tenant, body, sticky)
        call = await self._builder.chat(f"chatcmpl-{uuid.uuid4().hex}", int(self.wall_s()), tenant, body, binding)
        return self._with_share(call, body.max_tokens is None and body.max_completion_tokens is None)

    async def completion_call(self, tenant: str, body: CompletionBody, sticky: str | None = None) -> Call:
        """Raises NotReady, ModelNotFound, BadRequest."""
        binding = self._bind(tenant, body, sticky)
        call = await self._builder.completion(f"cmpl-{uuid.uuid4().hex}", int(self.wall_s()), tenant, body, binding)
        return self._with_share(call, body.max_tokens is None)

    def _with_share(self, call: Call, is_open_ended: bool) -> Call:
        """The call with its tenant's weight and slots, and how long its answer will be if the client did not say."""
        expected = self.outputs.expected(call.tenant) if is_open_ended else None
        limits = self.limits.limits_of(call.tenant)
        return replace(call, weight=limits.weight or 1.0, max_slots=limits.max_slots, expected_tokens=expected)

    def _bind(self, tenant: str, body: GenerationBody, sticky: str | None) -> Binding:
        """Resolve the model once; whatever happens to its alias later, this call keeps the version.

        Under a canary the same key gets the same version: the client's own, else its `user`, else the tenant.
        """
        base, tokenizer = self.catalog.base, self._tokenizer
        if base is None or tokenizer is None:
            raise NotReady("no replica has published its base model yet; retry later")
        resolution = self.catalog.resolve(tenant, body.model, body.user if sticky is None else sticky)
        if resolution.digest is not None:
            self._used.add(resolution.digest)
        return Binding(resolution, base, tokenizer)

    def stopping(self, replica_ids: frozenset[str], starting: frozenset[str] = frozenset()) -> bool:
        """Send nothing more to these replicas, nor yet to those `starting`, while there are others.

        Returns whether there are new ones among those that stop.
        """
        self.placement.starting(starting)
        return self.placement.leaving(replica_ids)

    async def exchange(self, gateway_id: str, source: PulseSource) -> None:
        """One heartbeat: tell loads and demand, hear the fleet's, and begin to warm adapters at the homes they gained.

        It waits for `source` and for no replica.
        """
        pulse = await source.pulse_gateway(self.placement.pulse(gateway_id))
        self._prefetcher.begin(self._live_at(self.placement.hear(pulse)))

    async def preload(self) -> None:
        """Bring adapters to their homes whose time has come since the last call. Those that did not come, or for which
        there was no replica, are tried again by the next one."""
        due = self._preloads.due(self._scheduled, self.wall_s())
        if not self.catalog.replicas:
            self._preloads.owe(due)
            return
        homes = [(name, home.replica_id) for name in due for home in self.placement.policy.homes(name)]
        self._preloads.owe(await self._prefetcher.bring(self._live_at(homes)))

    def _live_at(self, homes: Sequence[tuple[str, str]]) -> dict[str, dict[str, str]]:
        """Replica id -> adapter -> the digest of its live version, of (adapter, replica id) in `homes`."""
        adapters = {adapter.name: adapter for adapter in self.catalog.adapters} if homes else {}
        wanted: dict[str, dict[str, str]] = {}
        for name, replica_id in homes:
            version = _live(adapters.get(name))
            if version is not None:
                wanted.setdefault(replica_id, {})[name] = version
        return wanted

    def take_used(self) -> tuple[str, ...]:
        """The digests that requests were resolved to since the last call."""
        used, self._used = self._used, set()
        return tuple(used)

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        return self._wall_clock()

    async def share_limits(self, gateway_id: str, sharer: LimitSharer) -> None:
        """Say what this gateway holds and wants of tenants' limits, and which keys it has seen; take its new parts.

        Raises RegistryError; the parts stay what they were, and the keys are told again.
        """
        self._untold_keys.update(self.authenticator.take_used())
        uses, used_keys = self.limits.uses(), tuple(self._untold_keys)
        if not (uses or used_keys or self.limits.holds_any):
            return
        self._num_shares += 1
        shares = await sharer.share_limits(gateway_id, self._num_shares, uses, used_keys)
        self._untold_keys.difference_update(used_keys)
        self.limits.take(shares or ())

    def generation(self, call: Call, arrival: Arrival | None = None) -> "Generation":
        """The call, ready to run. `arrival` is the request it came with."""
        return Generation(call, self, arrival or self.journal.arrival(call.call_id))

    def dispatch(self, call: Call, number: int, origin: Origin = UNKNOWN_ORIGIN) -> Dispatch:
        """Prompt `number` of the call, on its way to a replica, which is told its `origin`."""
        return Dispatch(
            self.placement,
            self._fleet,
            replace(call.request(number), origin=origin),
            call.resolution.adapter,
            self.config.placement.max_tries,
            is_whole=call.is_whole,
        )

    async def exposition(self) -> bytes:
        """One scrape for the fleet: the metrics of all gateways, replicas and the registry, as far as they answer."""
        return await asyncio.to_thread(merge_expositions, await self.expositions())

    async def expositions(self) -> dict[str, bytes]:
        """Instance -> its own Prometheus text, of this gateway and every member that answers."""
        members, registry, peers = await asyncio.gather(
            self._fleet.metrics(), self._registry_metrics(), self._peers.metrics()
        )
        return {self.config.instance: await self.own_exposition(), **peers, **registry, **members}

    async def own_exposition(self) -> bytes:
        """Prometheus text of this gateway alone."""
        await self.metrics.settle()
        return await asyncio.to_thread(self.metrics.exposition)

    async def instances(self) -> list[str]:
        """What can be scraped alone: the gateways, the registry, every replica of the catalog.

        Raises GatewaySilent when nobody says which gateways there are.
        """
        return [self.config.instance, *await self._peers.names(), *self._other_instances()]

    def _other_instances(self) -> list[str]:
        return [REGISTRY_INSTANCE, *(replica.replica_id for replica in self.catalog.replicas)]

    async def exposition_of(self, instance: str) -> bytes:
        """One member's own text.

        Raises MemberNotFound, and when it does not answer GatewaySilent, ReplicaGone or RegistryUnavailable.
        """
        if instance == self.config.instance:
            return await self.own_exposition()
        if instance not in self._other_instances():
            peer = await self._peers.metrics_of(instance)
            if peer is None:
                raise MemberNotFound(f"no member of the fleet is called {instance[:80]!r}")
            return peer
        if instance == REGISTRY_INSTANCE:
            return await self.registry.metrics()
        text = await self._fleet.metrics_of(instance)
        if text is None:
            raise ReplicaGone(f"replica {instance} does not answer")
        return text

    async def _registry_metrics(self) -> dict[str, bytes]:
        try:
            return {REGISTRY_INSTANCE: await self.registry.metrics()}
        except RegistryError:
            return {}

    async def slots(self) -> Mapping[str, Sequence[SlotView]]:
        """Replica id -> who sits in which of its slots; replicas that do not answer are left out."""
        return await self._fleet.slots()

    def check_integrity(self) -> None:
        """Assert that every place on a replica belongs to an admitted prompt."""
        self.placement.check_integrity()
        assert self.placement.num_leases <= self.admission.num_in_flight, repr(self)


def _live(adapter: AdapterRecord | None) -> str | None:
    """The digest that the adapter's `live` alias serves."""
    version = None if adapter is None else adapter.version(adapter.aliases.get(LIVE_ALIAS, 0))
    return None if version is None or version.state is not VersionState.ACTIVE else version.digest


def _is_served(adapter: AdapterRecord) -> bool:
    return any(version.state is VersionState.ACTIVE for version in adapter.versions)


class Generation:
    """One running call: it holds its places until `deltas` ends or is closed."""

    def __init__(self, call: Call, gateway: Gateway, arrival: Arrival) -> None:
        self.call = call
        self._gateway = gateway
        self._arrival = arrival
        self._runs: list[PromptRun] = []

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as usage counts them."""
        return sum(run.num_tokens for run in self._runs)

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Deltas of all choices in order of arrival. Raises TooManyRequests and NoReplica at once, replica errors
        when they happen; closing it aborts the work."""
        call, gateway = self.call, self._gateway
        await gateway.limits.ready(call.tenant)
        with (
            gateway.journal.entry(call, self._arrival) as entry,
            gateway.metrics.meter(call.resolution, call.tenant, call.num_prompt_tokens) as meter,
            gateway.admission.admit(len(call.prompts)),
            gateway.limits.admit(call.tenant, len(call.prompts), call.num_charged_tokens) as charge,
            _settled(charge, self),
        ):
            meter.admitted()
            origin = entry.origin
            self._runs = [
                PromptRun(call, prompt, gateway.dispatch(call, number, origin), meter.pace())
                for number, prompt in enumerate(call.prompts)
            ]
            entry.runs = self._runs
            streams = [run.deltas() for run in self._runs]
            async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as messages:
                async for deltas in messages:
                    yield deltas
            gateway.outputs.note(call.tenant, [choice.num_tokens for run in self._runs for choice in run.choices])


@contextmanager
def _settled(charge: Charge, generation: Generation) -> Iterator[None]:
    """Charge what was really sampled, however the block ends."""
    try:
        yield
    finally:
        charge.settle(generation.call.num_prompt_tokens + generation.num_tokens)
