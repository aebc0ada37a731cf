"""Do real replicas order routing policies as the simulation does, and does a hot adapter get the whole fleet?

    python benchmarks/routing_real.py

Four real replicas in one process whose base sleeps 80 ms a step (8 rows, 12 slots, host memory for 75 adapters), and
whose reads from the node's disk, one at a time, sleep 0.4 s: scheduler, adapter cache and loads are the engine's own.
First a Zipf(1.0) stream over 192 adapters at three quarters of their capacity, the same for every policy of
`routing_sim.py`, beside a simulation with these times; the first fifth is not counted. Then 48 clients on 200 adapters,
with disk and host memory that cost nothing: all alike, and with 90 % of requests for one of them.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from cluster.planning.machine import Machine  # noqa: E402
from cluster.planning.policies import policies  # noqa: E402
from cluster.planning.simulator import WARM_UP_SHARE, Fleet, Policy, simulate  # noqa: E402
from cluster.planning.workloads import zipf  # noqa: E402
from registry.adapter_format import read_adapter  # noqa: E402
from registry.config import RegistryConfig  # noqa: E402
from registry.types import AdapterManifest  # noqa: E402
from replica.adapters.image_reader import ImageReader  # noqa: E402
from replica.adapters.node_store import FolderSource  # noqa: E402
from replica.adapters.weights import AdapterImage, plan_layout  # noqa: E402
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig  # noqa: E402
from replica.messages import GenerateRequest, SamplingParams  # noqa: E402
from replica.model.base_model import BaseModel  # noqa: E402
from replica.replica import Replica  # noqa: E402
from router.config import PlacementConfig  # noqa: E402
from tests.fakes import PacedModel  # noqa: E402
from tests.tiny_models import make_adapter, make_model  # noqa: E402

NUM_REPLICAS, NUM_TOKENS, NUM_ADAPTERS, NUM_STREAMED = 4, 16, 200, 192
PACED = Machine(
    num_slots=12,
    num_rows=8,
    num_host_adapters=75,
    step_s=0.08,
    lora_step_s=0,
    adapter_step_s=0,
    prefill_token_s=0,
    swap_s=0.01,
    node_load_s=0.4,
)
NEWS_S = 0.06
"""How old a replica's word on its slots may be: what Serve needs to spread multiplexed model ids."""


class PacedReader(ImageReader):
    """A disk that gives one adapter at a time, each in `node_load_s`."""

    def __init__(self) -> None:
        super().__init__()
        self._disk = threading.Lock()

    def read(self, *arguments: Any) -> AdapterImage:
        with self._disk:
            time.sleep(PACED.node_load_s)
            return super().read(*arguments)


@dataclass(frozen=True)
class Outcome:
    """What clients and replicas saw of one run."""

    slot_hit_rate: float
    loads_per_1000: float
    load_skew: float
    p50_first_token_s: float
    p99_first_token_s: float
    requests_per_s: float


class Rig:
    """Four paced replicas and the adapters that they serve."""

    def __init__(self, manifests: Sequence[AdapterManifest], replicas: Sequence[Replica]) -> None:
        self.manifests = manifests
        self.replicas = replicas
        self.index = {manifest.digest: number for number, manifest in enumerate(manifests)}
        self._number = 0

    async def serve(self, policy: Policy, fleet: Fleet, adapter: int, served: Counter[int]) -> float:
        """One request to its end; its first token's delay in seconds."""
        began_s = time.monotonic()
        chosen = policy.choose(adapter, fleet, began_s)
        fleet.loads[chosen] += 1
        fleet.in_flight[adapter] += 1
        first_s = 0.0
        try:
            async for _ in self.replicas[chosen].generate(self._request(adapter)):
                first_s = first_s or time.monotonic() - began_s
        finally:
            fleet.loads[chosen] -= 1
            fleet.in_flight[adapter] -= 1
        served[chosen] += 1
        return first_s

    def _request(self, adapter: int) -> GenerateRequest:
        self._number += 1
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        return GenerateRequest(f"r{self._number}", "tenant", self.manifests[adapter].digest, (5, 6, 7), sampling)

    async def tell_news(self, fleet: Fleet) -> None:
        """Keep the policies' view of slots and host memory fresh."""
        while True:
            for replica, resident, hosted in zip(self.replicas, fleet.resident, fleet.hosted, strict=True):
                status = replica.status()
                for told, digests in ((resident, status.resident), (hosted, status.host_cached)):
                    told.clear()
                    told.update(self.index[digest] for digest in digests)
            await asyncio.sleep(NEWS_S)

    def counts(self) -> tuple[int, int, int]:
        """Slot hits, misses and loads of all replicas."""
        every = [replica.status() for replica in self.replicas]
        return (
            sum(each.num_slot_hits for each in every),
            sum(each.num_slot_misses for each in every),
            sum(each.num_adapter_loads for each in every),
        )


def make_manifests(folder: Path, base: Path, spec: Any, blobs: dict[str, Path]) -> list[AdapterManifest]:
    manifests = []
    for number in range(NUM_ADAPTERS):
        made = make_adapter(base, ("q_proj", "v_proj"), 8, folder=folder / f"adapter-{number}", seed=number)
        manifests.append(read_adapter({path.name: path for path in made.iterdir()}, spec, RegistryConfig()))
        blobs[manifests[-1].blob_sha256] = made / "adapter_model.safetensors"
    return manifests


@asynccontextmanager
async def rig(
    folder: Path, name: str, base: Path, real: BaseModel, made: tuple[Any, Any], *, is_disk_paced: bool
) -> AsyncIterator[Rig]:
    """Fresh replicas, so that every policy starts with empty slots."""
    manifests, blobs = made
    image_bytes = plan_layout(manifests[0], {site.path: site for site in real.sites}, real.dtype).num_bytes
    num_host = PACED.num_host_adapters if is_disk_paced else NUM_ADAPTERS
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(
            max_slots=PACED.num_slots, node_store=folder / name, host_bytes=num_host * image_bytes
        ),
        scheduler=SchedulerConfig(num_kv_blocks=256, max_num_seqs=PACED.num_rows),
    )
    loader = PacedModel.loader(real.spec, sites=real.sites, step_s=PACED.step_s)  # type: ignore[arg-type]
    replicas = [Replica(config, FolderSource(blobs.__getitem__), model_loader=loader) for _ in range(NUM_REPLICAS)]
    try:
        for replica in replicas:
            await asyncio.to_thread(replica.load)
            if is_disk_paced:
                replica._cache._loader._reader = PacedReader()
            for manifest in manifests:
                await replica.stage(manifest)
        yield Rig(manifests, replicas)
        for replica in replicas:
            await asyncio.to_thread(replica.engine.wait_idle, 5.0)
            replica.check_integrity()
    finally:
        for replica in replicas:
            replica.close()


Traffic = Callable[[Callable[[int], Awaitable[float]]], Awaitable[list[float]]]


async def drive(rig: Rig, policy: Policy, traffic: Traffic, num_warm: int = 0) -> Outcome:
    """Let `traffic` send requests by the policy, and gather what came of all but the first `num_warm`."""
    fleet = Fleet.of(NUM_REPLICAS)
    served: Counter[int] = Counter()
    news = asyncio.create_task(rig.tell_news(fleet))
    before, began_s, num_sent = rig.counts(), time.monotonic(), 0

    async def send(adapter: int) -> float:
        nonlocal before, began_s, num_sent
        if num_sent == num_warm:
            before, began_s = rig.counts(), time.monotonic()
            served.clear()
        num_sent += 1
        return await rig.serve(policy, fleet, adapter, served)

    try:
        delays_s = (await traffic(send))[num_warm:]
    finally:
        news.cancel()
    took_s = time.monotonic() - began_s
    hits, misses, loads = (after - earlier for after, earlier in zip(rig.counts(), before, strict=True))
    p50, p99 = np.percentile(delays_s, [50, 99])
    return Outcome(
        round(hits / (hits + misses), 3),
        round(1000 * loads / len(delays_s), 1),
        round(max(served.values()) * NUM_REPLICAS / sum(served.values()), 3),
        round(float(p50), 4),
        round(float(p99), 4),
        round(len(delays_s) / took_s, 2),
    )


def open_loop(adapters: Sequence[int], at_s: Sequence[float]) -> Traffic:
    """Requests at set times, whatever the replicas do."""

    async def traffic(send: Callable[[int], Awaitable[float]]) -> list[float]:
        began_s, tasks = time.monotonic(), []
        for adapter, then_s in zip(adapters, at_s, strict=True):
            await asyncio.sleep(max(0.0, began_s + then_s - time.monotonic()))
            tasks.append(asyncio.ensure_future(send(adapter)))
        return await asyncio.gather(*tasks)

    return traffic


def closed_loop(adapters: Sequence[int], num_clients: int = 48) -> Traffic:
    """Clients that send their next request when the last one has ended."""

    async def traffic(send: Callable[[int], Awaitable[float]]) -> list[float]:
        queue, delays_s = iter(adapters), []

        async def client() -> None:
            for adapter in queue:
                delays_s.append(await send(adapter))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return delays_s

    return traffic


async def measure(folder: Path, num_streamed: int, num_hot: int, seed: int) -> dict[str, Any]:
    base, blobs = make_model(folder / "base"), dict[str, Path]()
    real = BaseModel.load(ModelConfig(base=str(base), device="cpu", num_threads=1))
    made = make_manifests(folder, base, real.spec, blobs), blobs
    makers = policies(NUM_REPLICAS, PACED, NUM_ADAPTERS, PlacementConfig(), seed)
    rate = 0.75 * NUM_REPLICAS * PACED.requests_per_s(1, NUM_TOKENS, 1)
    stream = zipf(num_streamed, rate, NUM_STREAMED, 1.0, seed)
    stream.output_tokens[:] = NUM_TOKENS
    stream.prompt_tokens[:] = 3
    results: dict[str, Any] = {"stream": {}, "simulated": {}, "hot": {}}
    for name in makers:
        async with rig(folder, f"stream {name}", base, real, made, is_disk_paced=True) as ready:
            traffic = open_loop(stream.adapters.tolist(), stream.at_s.tolist())
            outcome = await drive(ready, makers[name](), traffic, int(WARM_UP_SHARE * num_streamed))
            results["stream"][name] = asdict(outcome)
        simulated = asdict(simulate(PACED, NUM_REPLICAS, makers[name](), stream))
        results["simulated"][name] = {key: round(value, 4) for key, value in simulated.items()}
        print(name, results["stream"][name], "simulated", results["simulated"][name], flush=True)
    draw = random.Random(seed)
    mixes = {
        "uniform": [draw.randrange(NUM_ADAPTERS) for _ in range(num_hot)],
        "hot": [0 if draw.random() < 0.9 else draw.randrange(NUM_ADAPTERS) for _ in range(num_hot)],
    }
    for name in ("lorafleet", "ray multiplexing"):
        for mix, adapters in mixes.items():
            async with rig(folder, f"{mix} {name}", base, real, made, is_disk_paced=False) as ready:
                results["hot"][f"{name}, {mix}"] = asdict(await drive(ready, makers[name](), closed_loop(adapters)))
            print(name, mix, results["hot"][f"{name}, {mix}"], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--hot-requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder), arguments.requests, arguments.hot_requests, arguments.seed))
    print(save("routing_real", __doc__ or "", {**vars(arguments), "machine": asdict(PACED)}, results))


if __name__ == "__main__":
    main()
