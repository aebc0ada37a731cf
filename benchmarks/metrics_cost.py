"""What does it cost to tell of what goes on? CPU seconds a token with metrics, logs, traces, against none of them.

    python -m benchmarks.metrics_cost [--processes 16] [--rounds 20] [--tokens 32] [--engine paced|tiny]
    python -m benchmarks.metrics_cost --instructions --rounds 10

Gateway and replica in one process, as `cluster` wires them, without Ray and without a network, whose price would only
make the ratio smaller. `paced`: the engine is real and the base model sleeps, so all processor time is ours; `tiny`:
a real base of two layers. Streams of about one token a message, four adapters and three tenants. All set-ups stand
side by side in the process; a round runs a block of each, in turning order. Blocks are short and many, for the
machine's own pace wanders by 15 % within a second. A set-up's place in memory is worth 1 % for as long as a process
runs: there are several processes, each makes the set-ups in another order, and each gives one ratio. A set-up that
exports metrics is scraped after every 15 s of its own blocks, as Prometheus would. Logs are JSON lines in a file; spans
go over OTLP to a process beside it. `none` still keeps the ledger of use, by which tenants are charged.

With `--instructions` valgrind counts instructions in user space instead: what a busy machine does to caches and clocks
is not in them, nor is the kernel's work, of which metrics make none. A step takes 0.2 s then, so that one token a
message stays the rule. Scrapes are counted by themselves, and added as a scrape in 15 s at the paced base's own speed
would be. Traces are left out: their exporter goes by the clock.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.instructions import FOLDER, Instructions, under_valgrind
from benchmarks.intervals import ratio_of
from benchmarks.provenance import save
from cluster.replica_journal import ReplicaJournal
from registry.catalog import Catalog, Resolution
from registry.config import RegistryConfig
from registry.service import Registry
from registry.types import AdapterRecord, CatalogDelta, ReplicaRecord
from registry.usage_ledger import UsageLedger
from replica import engine
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.metrics import ReplicaMetrics
from replica.model.base_model import BaseModel
from replica.replica import Replica
from router.app import create_app
from router.config import RouterConfig
from router.gateway import Gateway
from router.journal import Journal
from router.meters import RequestMeter
from router.metrics import GatewayMetrics
from router.pace import Pace
from telemetry.exporter import Reader
from telemetry.logs import LOGGERS, LogConfig, set_up
from telemetry.traces import TraceConfig, Tracer, open_tracer
from tests.e2e.test_metrics_truth import TENANT_HEADER, TenantsByHeader
from tests.fakes import PacedModel
from tests.local_fleet import LocalReplicas, adapter_files
from tests.tiny_models import make_adapter, make_model

NAMES = ("legal", "sql", "support", "poems")
TENANTS = ("acme", "beta", "gamma")
STEP_S = 0.002
COUNTED_STEP_S = 0.2
SCRAPE_S = 15.0
REPLICA_ID = "replica-0"
WARM_UP = 2
"""Blocks of each set-up that are not measured."""
LIMIT = 1.02
TRACES_LIMIT = 1.05


class NoPace(Pace):
    """Notes the first token, which a line in the log has, and nothing else."""

    __slots__ = ()

    def arrived(self, num_tokens: int, num_open: int) -> None:
        if self.first_s is None:
            self.first_s = self._clock()


class NoMeter(RequestMeter):
    """Times nothing."""

    def __init__(self) -> None:
        """Needs no series."""

    def __enter__(self) -> "NoMeter":
        return self

    def __exit__(self, *error: Any) -> None:
        return

    def admitted(self) -> None:
        return

    def pace(self) -> Pace:
        return NoPace(time.monotonic, self.settle)

    def settle(self) -> None:
        return


class NoGatewayMetrics(GatewayMetrics):
    """A gateway's, taking nothing."""

    def meter(self, resolution: Resolution, tenant: str, num_prompt_tokens: int) -> RequestMeter:
        return NoMeter()

    def placed(self, kind: str, held: str) -> None:
        return

    def watch(self, reader: Reader) -> None:
        return


class NoReplicaMetrics(ReplicaMetrics):
    """A replica's, taking nothing."""

    def on_start(self, *figures: Any) -> None:
        return

    def on_step(self, *figures: Any) -> None:
        return

    def on_end(self, *figures: Any) -> None:
        return

    def observe(self, *figures: Any) -> None:
        return


@dataclass(frozen=True)
class Setup:
    """One way to run the fleet: what Gateway and Replica are built with, and what is done between the two.

    Its ratio is to the set-up called `none`, and should be at most `limit`.
    """

    name: str
    gateway: Callable[[], Mapping[str, Any]]
    replica: Callable[[], Mapping[str, Any]]
    prepare: Callable[[Replica], None] = lambda replica: None
    is_scraped: bool = False
    is_logged: bool = False
    limit: float = LIMIT


def told(name: str, *, with_metrics: bool, is_logged: bool, traced: bool, limit: float = LIMIT) -> Setup:
    """A set-up whose requests are written down as `cluster` does it."""
    tracers: list[Tracer] = []

    def gateway() -> Mapping[str, Any]:
        journal = Journal(UsageLedger("gateway"), tracers[0])
        return {"journal": journal} if with_metrics else {"journal": journal, "metrics": NoGatewayMetrics()}

    def prepare(replica: Replica) -> None:
        tracers.append(open_tracer(TraceConfig(enabled=traced, endpoint=SINK.url), role="replica", member=REPLICA_ID))
        journal = ReplicaJournal(REPLICA_ID, UsageLedger(REPLICA_ID), tracers[0])
        soon = asyncio.get_running_loop().call_soon_threadsafe
        replica.report_to(partial(soon, journal.ended), partial(soon, journal.preempted))

    def engine() -> Mapping[str, Any]:
        return {} if with_metrics else {"metrics": NoReplicaMetrics()}

    return Setup(name, gateway, engine, prepare, is_scraped=with_metrics, is_logged=is_logged, limit=limit)


class Sink:
    """A collector in a process of its own, which reads what it is sent and says yes."""

    CODE = (
        "import http.server as h\n"
        "class S(h.BaseHTTPRequestHandler):\n"
        "    protocol_version = 'HTTP/1.1'\n"
        "    def do_POST(self):\n"
        "        self.rfile.read(int(self.headers['content-length']))\n"
        "        self.send_response(200)\n"
        "        self.send_header('content-length', '0')\n"
        "        self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "s = h.ThreadingHTTPServer(('127.0.0.1', 0), S)\n"
        "print(s.server_port, flush=True)\n"
        "s.serve_forever()\n"
    )

    url = ""

    def __enter__(self) -> "Sink":
        self._child = subprocess.Popen([sys.executable, "-c", self.CODE], stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.url = f"http://127.0.0.1:{self._child.stdout.readline().strip()}/v1/traces"
        return self

    def __exit__(self, *error: Any) -> None:
        self._child.kill()
        self._child.wait()


SINK = Sink()
"""This run's."""


SETUPS: tuple[Setup, ...] = (
    told("none", with_metrics=False, is_logged=False, traced=False),
    told("metrics", with_metrics=True, is_logged=False, traced=False),
    told("metrics and logs", with_metrics=True, is_logged=True, traced=False),
    told("metrics, logs and traces", with_metrics=True, is_logged=True, traced=True, limit=TRACES_LIMIT),
    told("logs alone", with_metrics=False, is_logged=True, traced=False),
    told("traces alone", with_metrics=False, is_logged=False, traced=True, limit=TRACES_LIMIT),
    told("none again", with_metrics=False, is_logged=False, traced=False),
)
"""The first is what the others are compared with; the last is the same, and shows what a ratio means."""

DEFAULT_SETUPS = ("metrics", "metrics and logs", "metrics, logs and traces", "none again")
COUNTED_SETUPS = ("metrics", "metrics and logs", "logs alone", "none again")


class Cost(Protocol):
    """What is measured of a block."""

    def begin(self) -> None: ...
    def end(self) -> float: ...


class CpuSeconds:
    """Of the whole process."""

    def begin(self) -> None:
        self._started_s = time.process_time()

    def end(self) -> float:
        return time.process_time() - self._started_s


class BlobRegistry:
    """Only what `Gateway.apply` and a scrape need."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._blob = tokenizer_json

    async def read_blob(self, sha256: str) -> bytes:
        return self._blob

    async def metrics(self) -> bytes:
        return b""


class Arm:
    """One set-up, running."""

    def __init__(self, setup: Setup, replica: Replica, gateway: Gateway) -> None:
        self.setup = setup
        self._replica = replica
        self._gateway = gateway
        self._app = create_app(gateway)
        self._unscraped_s = 0.0
        self.num_messages = 0

    async def block(self, args: argparse.Namespace, cost: Cost) -> float:
        """The cost of each token of a block."""
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.INFO if self.setup.is_logged else logging.WARNING)
        gc.collect()
        gate, began_s = asyncio.Semaphore(args.concurrency), time.monotonic()
        cost.begin()

        async def one(number: int) -> None:
            async with gate:
                await self._stream(NAMES[number % len(NAMES)], TENANTS[number % len(TENANTS)], args.tokens)

        await asyncio.gather(*(one(number) for number in range(args.requests)))
        self._unscraped_s += time.monotonic() - began_s
        if self.setup.is_scraped and not args.instructions and self._unscraped_s >= SCRAPE_S:
            self._unscraped_s = 0.0
            await self._gateway.exposition()
        block = cost.end()
        if self.setup.is_scraped and args.instructions:
            cost.begin()
            await self._gateway.exposition()
            block += cost.end() * args.requests * args.tokens / (SCRAPE_S * args.concurrency / STEP_S)
        return block / (args.requests * args.tokens)

    async def _stream(self, name: str, tenant: str, num_tokens: int) -> None:
        body = {"model": f"{name}@1", "prompt": "hello", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
        sent = await call(self._app, json.dumps(body).encode(), tenant)
        self.num_messages += sent

    async def close(self) -> None:
        await asyncio.to_thread(self._replica.close)


async def call(app: Any, body: bytes, tenant: str) -> int:
    """One streamed call without a socket; returns the number of messages."""
    asked, forever, count = False, asyncio.Event(), 0

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await forever.wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal count
        count += 1
        assert message.get("status", 200) == 200, message

    headers = [(b"content-type", b"application/json"), (TENANT_HEADER.encode(), tenant.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "root_path": "", "headers": headers}
    scope |= {"raw_path": b"", "query_string": b"", "http_version": "1.1", "scheme": "http"}
    await app(scope, receive, send)
    return count


@dataclass(frozen=True)
class Ground:
    """What all set-ups share: a base, and adapters whose manifests and bytes a registry has taken."""

    folder: Path
    base: Path
    registry: Registry
    records: tuple[AdapterRecord, ...]
    engine: str
    step_s: float

    def fetch(self, sha256: str, to: Path) -> None:
        """As `replica.adapters.node_store.BlobSource`."""
        to.write_bytes(self.registry.blobs.read(sha256, 0, self.registry.blobs.size(sha256)))

    def load(self, config: ModelConfig) -> Any:
        real = BaseModel.load(config)
        if self.engine == "tiny":
            return real
        tokenizer = (self.base / "tokenizer.json").read_bytes()
        return PacedModel(real.spec, tokenizer, sites=real.sites, step_s=self.step_s, token_id=65)


@asynccontextmanager
async def ground(folder: Path, engine: str, step_s: float) -> AsyncIterator[Ground]:
    base = make_model(folder / "tiny-llama")
    registry = Registry.open(RegistryConfig(data_dir=folder / "registry", new_adapters="public"))
    spec = BaseModel.load(ModelConfig(base=str(base), device="cpu", num_threads=1)).spec
    registry.blobs.put_bytes((base / "tokenizer.json").read_bytes())
    registry.publish_base(spec, actor="benchmark")
    for seed, name in enumerate(NAMES):
        made = make_adapter(base, ("q_proj", "v_proj"), 8, folder=folder / name, seed=seed)
        registry.push(name, adapter_files(made), owner="default", activate=False)
    yield Ground(folder, base, registry, registry.adapters(), engine, step_s)
    registry.close()


async def arm_of(setup: Setup, on: Ground) -> Arm:
    """The set-up with every adapter staged and its gateway ready."""
    config = ReplicaConfig(
        model=ModelConfig(base=str(on.base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(
            node_store=on.folder / f"node-{setup.name.replace(' ', '-')}", max_slots=len(NAMES)
        ),
        scheduler=SchedulerConfig(num_kv_blocks=512),
    )
    replica = Replica(config, on, model_loader=on.load, **setup.replica())
    setup.prepare(replica)
    spec = await asyncio.to_thread(replica.load)
    for record in on.records:
        await replica.stage(on.registry.manifest(record.versions[0].digest))
    registry: Any = BlobRegistry(replica.tokenizer_json)
    gateway = Gateway(
        RouterConfig(), Catalog(("tiny",)), LocalReplicas({REPLICA_ID: replica}), registry,
        authenticator=TenantsByHeader(), **setup.gateway(),
    )  # fmt: skip
    spec = spec.model_copy(update={"tokenizer_sha256": hashlib.sha256(replica.tokenizer_json).hexdigest()})
    member = ReplicaRecord(replica_id=REPLICA_ID, ring_id=0, node_id="n", num_slots=len(NAMES), revision=1)
    await gateway.apply(CatalogDelta(revision=1, full=True, adapters=on.records, replicas=(member,), base=spec))
    return Arm(setup, replica, gateway)


async def measure(args: argparse.Namespace, setups: Sequence[Setup]) -> dict[str, list[float]]:
    """The cost of a token of every block, by set-up."""
    costs: dict[str, list[float]] = {setup.name: [] for setup in setups}
    cost: Cost = Instructions() if args.instructions else CpuSeconds()
    step_s = COUNTED_STEP_S if args.instructions else STEP_S
    engine.IDLE_CHECK_S = 1e6  # set-ups whose turn it is not do nothing
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log, SINK:
        set_up(LogConfig(format="json"), role="benchmark", member=REPLICA_ID, stream=log)
        async with ground(Path(folder), args.engine, step_s) as shared:
            order = random.Random(args.seed).sample(setups, len(setups))
            arms = [await arm_of(setup, shared) for setup in order]
            for arm in arms:
                for _ in range(WARM_UP):
                    await arm.block(args, CpuSeconds())
                arm.num_messages = 0
            gc.freeze()
            for number in range(args.rounds):
                turn = number % len(arms)
                for arm in (*arms[turn:], *arms[:turn]):
                    costs[arm.setup.name].append(await arm.block(args, cost))
            for arm in arms:
                share = arm.num_messages / (args.rounds * args.requests * args.tokens)
                print(f"{arm.setup.name}: {share:.2f} messages a token")
                assert share > 0.8, "messages carry several tokens: an easy case"
                await arm.close()
    return costs


def in_processes(args: argparse.Namespace, setups: Sequence[Setup]) -> dict[str, list[float]]:
    """The cost of a token in each of several processes, a geometric mean over its rounds, by set-up."""
    costs: dict[str, list[float]] = {setup.name: [] for setup in setups}
    for seed in range(args.processes):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "costs.json"
            child = [sys.executable, "-m", "benchmarks.metrics_cost", *sys.argv[1:]]
            subprocess.run([*child, "--processes", "1", "--seed", str(seed), "--costs", str(out)], check=True)
            for name, blocks in json.loads(out.read_text()).items():
                costs[name].append(statistics.geometric_mean(blocks))
        print({name: round(1e6 * found[-1], 1) for name, found in costs.items()}, flush=True)
    return costs


def report(setups: Sequence[Setup], costs: Mapping[str, Sequence[float]], unit: str) -> list[dict[str, Any]]:
    none, rows = setups[0], []
    for setup in setups:
        row: dict[str, Any] = {"setup": setup.name, f"{unit}_per_token": round(statistics.median(costs[setup.name]), 2)}
        if setup is not none:
            ratio, low, high = ratio_of(costs[setup.name], costs[none.name])
            row |= {"ratio": round(ratio, 4), "low": round(low, 4), "high": round(high, 4), "limit": setup.limit}
        rows.append(row)
        print(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="at least 10, in each process")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the order in which set-ups are made")
    parser.add_argument("--costs", type=Path, help="only write the blocks' costs there")
    parser.add_argument("--requests", type=int, default=16, help="of a block")
    parser.add_argument("--tokens", type=int, default=32, help="of a request")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--engine", choices=("paced", "tiny"), default="paced")
    parser.add_argument("--setups", nargs="*", help="beside `none`")
    parser.add_argument("--instructions", action="store_true", help="count them under valgrind, instead of seconds")
    parser.add_argument("--name", help="of the file in results; metrics_cost_<engine> by default")
    args = parser.parse_args()
    assert args.rounds >= 10, "ten rounds at least"
    if args.instructions and FOLDER not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            under_valgrind("benchmarks.metrics_cost", sys.argv[1:], Path(folder))
        return
    args.setups = args.setups or (COUNTED_SETUPS if args.instructions else DEFAULT_SETUPS)
    setups = [SETUPS[0], *(setup for setup in SETUPS if setup.name in args.setups)]
    if args.processes > 1 and not args.instructions:
        costs = in_processes(args, setups)
    else:
        costs = asyncio.run(measure(args, setups))
    if args.costs:
        args.costs.write_text(json.dumps(costs))
        return
    if args.instructions:
        rows = report(setups, costs, "instructions")
    else:
        rows = report(setups, {name: [1e6 * s for s in seconds] for name, seconds in costs.items()}, "cpu_us")
    conditions = {
        **vars(args),
        "costs": None,
        "messages": "one token each",
        "adapters": len(NAMES),
        "tenants": len(TENANTS),
    }
    default = f"metrics_cost_{args.engine}" + "_instructions" * args.instructions
    print(save(args.name or default, __doc__ or "", conditions, rows))


if __name__ == "__main__":
    main()
