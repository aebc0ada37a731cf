"""What do HTTP, gateway and Ray cost on top of the engine?

    python benchmarks/fabric.py [--base BASE] [--rounds 3]

1. Throughput: output tokens/s of 16 streams through HTTP, as a ratio to the same engine driven in-process; one replica,
   blocks in turn, so that other load on the machine falls on both alike.
2. Processor time: 16 streams of 50 tokens/s from an engine whose model only sleeps. Counted is every process of the
   fleet; what the idle fleet uses in the same time, and what the engine alone costs in-process, are taken off.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.paced_fleet import STEP_S, load_paced  # noqa: E402
from benchmarks.provenance import save  # noqa: E402
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig  # noqa: E402
from replica.messages import GenerateRequest, SamplingParams  # noqa: E402
from replica.replica import Replica  # noqa: E402
from tests.fleet_process import FleetProcess  # noqa: E402
from tests.tiny_models import make_model  # noqa: E402

DEFAULT_BASE = "~/.cache/lorafleet/base/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_STREAMS = 16
PROMPT = tuple(range(1000, 1032))


class NoBlobs:
    """A blob source for engines that serve the base alone."""

    def fetch(self, sha256: str, to: Path) -> None:
        raise FileNotFoundError(sha256)


@dataclass(frozen=True)
class Block:
    num_tokens: int
    seconds: float
    cpu_s: float = 0.0


# The engine alone.


@asynccontextmanager
async def engine(base: str, loader: Any = None) -> AsyncIterator[Replica]:
    with tempfile.TemporaryDirectory() as folder:
        config = ReplicaConfig(
            model=ModelConfig(base=base, device="cpu", num_threads=1),
            adapters=AdapterCacheConfig(node_store=Path(folder)),
        )
        replica = Replica(config, NoBlobs(), **({} if loader is None else {"model_loader": loader}))
        await asyncio.to_thread(replica.load)
        try:
            yield replica
        finally:
            replica.close()


async def drive_engine(replica: Replica, num_tokens: int, prompt: tuple[int, ...]) -> Block:
    async def one(index: int) -> int:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        request = GenerateRequest(f"{time.time_ns()}-{index}", "bench", None, prompt, sampling)
        count = 0
        async for chunks in replica.generate(request):
            count += sum(len(chunk.token_ids) for chunk in chunks)
        return count

    cpu = time.process_time()
    started = time.perf_counter()
    counts = await asyncio.gather(*(one(index) for index in range(NUM_STREAMS)))
    return Block(sum(counts), time.perf_counter() - started, time.process_time() - cpu)


# The same through HTTP, with a client that costs next to nothing.


async def drive_http(port: int, model: str, num_tokens: int, prompt: tuple[int, ...]) -> Block:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    counts = await asyncio.gather(*(one_stream(port, json.dumps(body).encode()) for _ in range(NUM_STREAMS)))
    return Block(sum(counts), time.perf_counter() - started)


async def one_stream(port: int, body: bytes) -> int:
    """Completion tokens by the stream's own usage chunk."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    tail = b""
    while piece := await reader.read(65536):
        tail = (tail + piece)[-4096:]
    writer.close()
    usage = next(line for line in reversed(tail.split(b"\n")) if b'"completion_tokens"' in line)
    return int(json.loads(usage.strip().removeprefix(b"data: "))["usage"]["completion_tokens"])


async def throughput(base: str, rounds: int, num_tokens: int) -> dict[str, Any]:
    model = ModelConfig(base=base).base_name
    with FleetProcess(base, num_replicas=1) as fleet:
        async with engine(base) as replica:
            pairs = []
            await drive_engine(replica, 4, PROMPT)
            await drive_http(fleet.port, model, 4, PROMPT)
            for _ in range(rounds):
                inside = await drive_engine(replica, num_tokens, PROMPT)
                outside = await drive_http(fleet.port, model, num_tokens, PROMPT)
                pairs.append((inside.num_tokens / inside.seconds, outside.num_tokens / outside.seconds))
                print(f"  in-process {pairs[-1][0]:6.1f} tok/s, through HTTP {pairs[-1][1]:6.1f}", file=sys.stderr)
    ratios = [outside / inside for inside, outside in pairs]
    return {
        "in_process_tokens_per_s": [round(inside, 1) for inside, _ in pairs],
        "http_tokens_per_s": [round(outside, 1) for _, outside in pairs],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }


async def processor_time(rounds: int, num_tokens: int) -> dict[str, Any]:
    prompt = tuple(range(32))
    with tempfile.TemporaryDirectory() as folder:
        base = str(make_model(Path(folder) / "tiny"))
        with FleetProcess(base, num_replicas=1, import_path="benchmarks.paced_fleet:build") as fleet:
            async with engine(base, load_paced) as alone:
                await drive_http(fleet.port, "tiny", 4, prompt)
                results = [await one_round(fleet, alone, num_tokens, prompt) for _ in range(rounds)]
    fabric = statistics.median(result["fabric_us_per_token"] for result in results)
    return {"rounds": results, "fabric_us_per_token": fabric}


async def one_round(fleet: FleetProcess, alone: Replica, num_tokens: int, prompt: tuple[int, ...]) -> dict[str, Any]:
    inside = await drive_engine(alone, num_tokens, prompt)
    before_idle = fleet.cpu_s()
    await asyncio.sleep(inside.seconds)
    before = fleet.cpu_s()
    outside = await drive_http(fleet.port, "tiny", num_tokens, prompt)
    after = fleet.cpu_s()
    idle = {title: before[title] - before_idle.get(title, 0.0) for title in before}
    busy = {title: after[title] - before.get(title, 0.0) for title in after}
    per_token = {
        title: (busy[title] - idle.get(title, 0.0) * outside.seconds / inside.seconds) / outside.num_tokens * 1e6
        for title in busy
    }
    engine_us = inside.cpu_s / inside.num_tokens * 1e6
    result = {
        "tokens": outside.num_tokens,
        "tokens_per_s": round(outside.num_tokens / outside.seconds, 1),
        "all_us_per_token": round(sum(busy.values()) / outside.num_tokens * 1e6, 1),
        "idle_us_per_token": round(sum(idle.values()) / outside.num_tokens * 1e6, 1),
        "engine_us_per_token": round(engine_us, 1),
        "fabric_us_per_token": round(sum(per_token.values()) - engine_us, 1),
        "by_process_us_per_token": {
            title.split(" [")[0].split("/")[-1][:60]: round(cost, 1)
            for title, cost in sorted(per_token.items(), key=lambda item: -item[1])[:6]
        },
    }
    print(f"  {result}", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=os.environ.get("LORAFLEET_BASE", DEFAULT_BASE))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a stream in the throughput part")
    parser.add_argument("--only", choices=("throughput", "processor"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.only != "processor":
        print("throughput, real base", file=sys.stderr)
        results["throughput"] = asyncio.run(throughput(options.base, options.rounds, options.tokens))
        print(f"through HTTP / in-process: {results['throughput']['ratio']}")
    if options.only != "throughput":
        print("processor time, paced base", file=sys.stderr)
        results["processor"] = asyncio.run(processor_time(options.rounds, 200))
        print(f"fabric: {results['processor']['fabric_us_per_token']} us of processor time a token")
    conditions = {"streams": NUM_STREAMS, "replicas": 1, "torch_threads": 1, "paced_step_s": STEP_S}
    print(save("fabric" + (f"_{options.only}" if options.only else ""), __doc__ or "", conditions, results))


if __name__ == "__main__":
    main()
