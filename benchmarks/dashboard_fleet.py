"""A fleet in this process for looking at: real registry, engines and gateway over HTTP; only the base model sleeps.

Tenants have keys of their own, and send traffic until they are told to stop.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from registry.types import AdapterManifest, Scope, TenantLimits
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.model.base_files import resolve_base
from replica.model.base_model import BaseModel
from tests.fakes import PacedModel
from tests.fleet_process import free_port
from tests.local_fleet import LocalFleet, adapter_files, local_fleet
from tests.tiny_models import make_adapter, make_model

LETTER = "a"


@dataclass(frozen=True)
class Shape:
    """How large the fleet is, and how fast: a step takes `step_s` and `token_s` for each of its tokens."""

    num_replicas: int = 3
    max_slots: int = 8
    max_num_seqs: int = 16
    step_s: float = 0.02
    token_s: float = 0.0005


class Running:
    """The fleet with a port; `keys` by tenant."""

    def __init__(self, fleet: LocalFleet, base: Path, folder: Path, url: str) -> None:
        self.fleet = fleet
        self.url = url
        self.keys: dict[str, str] = {}
        self.traffic = Traffic(self)
        self._base, self._folder = base, folder
        self._num_made = 0

    async def add_tenant(self, name: str, *scopes: Scope, weight: float | None = None) -> str:
        """A tenant with one key, which is returned."""
        registry = self.fleet.registry
        await registry.add_tenant(name, TenantLimits(weight=weight), actor="setup")
        made = await registry.new_key(name, scopes or (Scope.INFER,), expires_at_s=None, note="", actor="setup")
        self.keys[name] = made.secret
        while self.fleet.gateway.catalog.access is None or made.key.key_id not in {  # noqa: ASYNC110 (the catalog follows on its own)
            key.key_id for key in self.fleet.gateway.catalog.access.keys
        }:
            await asyncio.sleep(0.02)
        return str(made.secret)

    def adapter(self, name: str, rank: int = 4) -> Path:
        """The folder of an adapter that nobody has pushed yet."""
        self._num_made += 1
        folder = self._folder / "made" / f"{name}-{self._num_made}"
        return make_adapter(self._base, ("q_proj", "v_proj"), rank, folder=folder, seed=self._num_made)

    async def push(self, name: str, owner: str, *, activate: bool = True) -> int:
        """Push one more version of `name`, without waiting for replicas; returns its number."""
        files = adapter_files(self.adapter(name))
        result = await self.fleet.registry.push(name, files, owner=owner, activate=activate)
        return int(result.version.number)

    def hold_staging(self, replica_id: str) -> None:
        """From now on this replica brings no bytes to its node, as behind a link that stalls."""
        never = asyncio.Event()

        async def stage(manifest: AdapterManifest) -> None:
            await never.wait()

        self.fleet.replicas[replica_id].stage = stage  # type: ignore[method-assign]

    async def wait_live(self, names: Sequence[str]) -> None:
        """Until the gateway serves every one of them."""
        while not {*names} <= {one.name for one in self.fleet.gateway.catalog.adapters if one.aliases}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class Traffic:
    """What tenants send; `stop` ends it and waits for the last answer."""

    def __init__(self, running: Running, seed: int = 0) -> None:
        self._url, self._keys = running.url, running.keys
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: dict[str, httpx.AsyncClient] = {}
        self.num_failed = 0

    def steady(
        self, tenant: str, models: Sequence[str], *, clients: int, max_tokens: int, pause_s: float = 0.0
    ) -> None:
        """So many clients that send one call after the other, to a model by chance (the first ones more often)."""
        http = self._http(tenant)
        for _ in range(clients):
            self._tasks.append(asyncio.create_task(self._client(http, models, max_tokens, pause_s)))

    def _http(self, tenant: str) -> httpx.AsyncClient:
        """The tenant's connections, as many as its clients need."""
        if tenant not in self._clients:
            headers, limits = {"Authorization": f"Bearer {self._keys[tenant]}"}, httpx.Limits(max_connections=None)
            self._clients[tenant] = httpx.AsyncClient(
                base_url=self._url, headers=headers, timeout=120, limits=limits, trust_env=False
            )
        return self._clients[tenant]

    async def _client(self, http: httpx.AsyncClient, models: Sequence[str], max_tokens: int, pause_s: float) -> None:
        weights = [1 / (place + 1) for place in range(len(models))]
        while True:
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.5))
            model = self._random.choices(models, weights)[0]
            body = {"model": model, "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
            body["user"] = f"user-{self._random.randrange(1000)}"
            with suppress(httpx.TransportError):
                answer = await http.post("/v1/completions", json=body)
                self.num_failed += not answer.is_success

    async def stop(self) -> None:
        """End what runs and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()


@asynccontextmanager
async def dashboard_fleet(folder: Path, shape: Shape | None = None) -> AsyncIterator[Running]:
    """The fleet on a loopback port; its files lie under `folder`."""
    shape = shape or Shape()
    base = make_model(folder / "base" / "tiny-llama")

    def load(config: ModelConfig) -> PacedModel:
        real = BaseModel.load(config)
        tokenizer_json = (resolve_base(config) / "tokenizer.json").read_bytes()
        token_id = ord(LETTER) - 33
        pace = {"step_s": shape.step_s, "token_s": shape.token_s}
        kv_token_bytes = real.kv_bytes_per_block(1)
        return PacedModel(
            real.spec, tokenizer_json, sites=real.sites, token_id=token_id, kv_token_bytes=kv_token_bytes, **pace
        )

    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=shape.max_slots, arena_bytes=1 << 24),
        scheduler=SchedulerConfig(num_kv_blocks=512, max_num_seqs=shape.max_num_seqs),
    )
    options = {"num_replicas": shape.num_replicas, "model_loader": load, "with_keys": True}
    async with local_fleet(folder, config, **options) as fleet, serving(fleet) as url:  # type: ignore[arg-type]
        yield Running(fleet, base, folder, url)


@asynccontextmanager
async def serving(fleet: LocalFleet) -> AsyncIterator[str]:
    """The gateway's application on a loopback port, in this event loop."""
    port = free_port()
    config = uvicorn.Config(fleet.app, host="127.0.0.1", port=port, log_level="error", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task
