"""The OpenAPI document, and a real fleet in one process that does what it says: schemathesis makes the requests."""

import asyncio
import threading
import zlib
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.config import SchemathesisConfig

from registry.types import Scope, TenantLimits
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from router.app import endpoints
from router.config import RequestLimits, RouterConfig
from router.deadline import TIMEOUT_HEADER
from router.openapi import document
from router.route_docs import DOCS, PARAMETERS
from tests.local_fleet import local_fleet
from tests.router.support import Stack
from tests.router.test_socket import served
from tests.router.test_tenants import RING, guarded_stack
from tests.tiny_models import make_adapter

NUM_EXAMPLES = 5
ROUTES = endpoints(Stack().gateway)
DOCUMENT = document(ROUTES, DOCS, PARAMETERS)


def test_every_route_is_described_with_who_may_call_it() -> None:
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path.replace(":path}", "}")][route.method.lower()]
        assert operation["security"] == ([] if route.scope is None else [{"key": []}])
        assert route.scope is None or f"`{route.scope}`" in operation["description"]
        assert route.scope is None or {"401", "403"} <= operation["responses"].keys()
        assert operation["summary"]
    assert sum(map(len, DOCUMENT["paths"].values())) == len(ROUTES) == len(DOCS)


def test_bodies_say_what_is_accepted_and_not_what_it_becomes() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    chat, completion = schemas["ChatBody"]["properties"], schemas["CompletionBody"]["properties"]
    assert chat["tool_choice"]["enum"] == [None, "none", "auto"]
    assert chat["audio"]["enum"] == [None]
    assert {"type": "string"} in completion["prompt"]["anyOf"]
    assert {"minLength": 1, "type": "string"} in chat["stop"]["anyOf"]
    assert schemas["ChatBody"]["additionalProperties"] is False


@pytest.mark.parametrize(("key", "status"), [("acme", 200), ("admin", 200), ("scraper", 403), ("old", 401), ("", 401)])
async def test_the_document_is_for_those_who_may_call(key: str, status: int) -> None:
    async with guarded_stack() as stack:
        response = await stack.http.get("/openapi.json", headers=RING.header(key) if key else {})
        assert response.status_code == status
        assert (response.json() == DOCUMENT) == (status == 200)


class Served:
    """A fleet with keys on a socket, in a loop of its own, and what there is to aim at."""

    def __init__(self, base: Path, folder: Path) -> None:
        self._base, self._folder = base, folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._started: Future[None] = Future()
        self._ended = asyncio.Event()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        self._running.add_done_callback(self._on_done)
        self._started.result(120)

    def _on_done(self, running: "Future[None]") -> None:
        if not self._started.done():
            self._started.set_exception(running.exception() or RuntimeError("the fleet ended"))

    async def _run(self) -> None:
        config = ReplicaConfig(
            model=ModelConfig(base=str(self._base), device="cpu", num_threads=1),
            adapters=AdapterCacheConfig(max_slots=2, arena_bytes=1 << 20),
            scheduler=SchedulerConfig(kv_bytes=1 << 20, prefix_cache=True),
        )
        requests_ = RequestLimits(default_max_tokens=4, max_n=4, max_prompts=8, request_timeout_s=20)
        router = RouterConfig(requests=requests_, activation_wait_s=0.2)
        async with local_fleet(
            self._folder, config, num_replicas=1, router=router, with_keys=True, source_roots=[self._folder / "src"]
        ) as fleet:
            self.fleet = fleet
            await self._furnish()
            async with served(fleet) as self.url:  # type: ignore[arg-type]
                self._started.set_result(None)
                await self._ended.wait()
            fleet.check_integrity()

    async def _furnish(self) -> None:
        registry = self.fleet.registry
        for number, name in enumerate(("legal", "spare", "next")):
            make_adapter(self._base, ("q_proj",), 2, folder=self._folder / "src" / name, seed=number)
        secret = await asyncio.to_thread(registry.registry.tenants.first_key, "default", note="")
        self.headers = {"Authorization": f"Bearer {secret.secret}"}
        for name in ("legal", "spare"):
            await self.fleet.push(name, self._folder / "src" / name)
        self.base_name = next(iter(self.fleet.gateway.catalog.base_names))

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def restore(self) -> None:
        """What earlier requests took away is there again."""
        registry = self.fleet.registry
        await self.fleet.push("legal", self._folder / "src" / "legal")
        if "acme" not in {tenant.name for tenant in await registry.tenants()}:
            await registry.add_tenant("acme", TenantLimits(), actor="test")
        made = await registry.new_key("acme", (Scope.INFER,), expires_at_s=None, note="", actor="test")
        self.key_id = made.key.key_id

    def aim(self, case: schemathesis.Case) -> None:
        """Have half of the well-formed requests ask for what there is."""
        if case.meta is not None and case.meta.generation.mode.is_negative:
            return
        if TIMEOUT_HEADER in (case.headers or {}):
            case.headers[TIMEOUT_HEADER] = "60"  # a shorter one may pass, which is a 504 as described
        if zlib.crc32(repr((case.path_parameters, case.body)).encode()) % 2:
            return
        there = {"name": "spare" if "quarantine" in case.path else "legal", "number": 1, "alias": "live"}
        there |= {"tenant": "acme", "key_id": self.key_id, "activation_id": 1, "model": "legal", "file": "icon.svg"}
        case.path_parameters = {name: there[name] for name in case.path_parameters or {}}
        if isinstance(case.body, dict) and "model" in case.body:
            case.body = {**case.body, "model": "legal" if len(case.body) % 2 else self.base_name}
        if isinstance(case.body, dict) and "version" in case.body:
            case.body = {**case.body, "version": 1}

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._running.result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture(scope="module")
def fleet(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        made = Served(tiny_base, tmp_path_factory.mktemp("fleet"))
        stack.callback(made.close)
        yield made


@pytest.fixture
def furnished(fleet: Served) -> Served:
    """The fleet, with all there is to aim at once more."""
    fleet.do(fleet.restore())
    return fleet


def config(num_examples: int, *, covers: bool) -> SchemathesisConfig:
    generation = {"max-examples": num_examples, "deterministic": True, "with-security-parameters": False}
    phases = {"coverage": {"enabled": covers}, "stateful": {"enabled": False}, "examples": {"enabled": False}}
    return SchemathesisConfig.from_dict({"generation": generation, "phases": phases})


UNCHECKED = [
    # Well-formed requests that are refused all the same: limits of the configuration, contexts, names that are taken.
    checks.positive_data_acceptance,
]
brief = schemathesis.openapi.from_dict(DOCUMENT, config=config(NUM_EXAMPLES, covers=False))
thorough = schemathesis.openapi.from_dict(DOCUMENT, config=config(60, covers=True))


def ask(fleet: Served, case: schemathesis.Case) -> None:
    fleet.aim(case)
    with requests.Session() as session:
        session.trust_env = False
        case.call_and_validate(fleet.url, session, headers=dict(fleet.headers), excluded_checks=UNCHECKED, timeout=60)


relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.soak
@brief.parametrize()
@relaxed
def test_answers_are_as_described(case: schemathesis.Case, furnished: Served) -> None:
    ask(furnished, case)


@pytest.mark.soak
@thorough.parametrize()
@relaxed
def test_answers_are_as_described_at_length(case: schemathesis.Case, furnished: Served) -> None:
    ask(furnished, case)
