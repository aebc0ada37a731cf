"""What does a gateway cost a request, and how many a second do one and two take? And choosing among 64 replicas?

    python -m benchmarks.gateway_throughput

Each gateway is the whole application over a fleet whose replicas answer at once, under uvicorn on a real socket in a
process of its own; one other process asks for short whole answers over kept connections, as fast as they come. On a
machine of two cores clients and gateways share them, so beside requests a second stands the processor time that a
gateway took for one, which other processes change little. The choice: a lease on one of 64 replicas with 10,000
adapters in the catalog, loads as they would be, demand for some adapters, taken and given back.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import psutil
import uvicorn

from benchmarks.provenance import ROOT, save
from registry.pulse import FleetPulse, HomePlan
from replica.messages import GenerateRequest
from router.config import PlacementConfig, RequestLimits, RouterConfig
from router.placement import Placement
from tests.fleet_process import free_port
from tests.router.fakes import Message, one_choice
from tests.router.support import ids_of, replica_record, running

NUM_REPLICAS, NUM_ADAPTERS, NUM_SPREAD, IN_FLIGHT = 64, 10_000, 50, 1000
BODY = b'{"model":"legal","prompt":"hello there","max_tokens":8}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY


def answer(replica_id: str, request: GenerateRequest) -> Iterable[Message]:
    return one_choice(request.request_id, [ids_of("hello")])


async def serve(port: int) -> None:
    """One gateway until it is killed."""
    config = RouterConfig(requests=RequestLimits(max_concurrent_requests=4096))
    async with running(config) as stack:
        stack.fleet.script = answer
        await uvicorn.Server(uvicorn.Config(stack.app, port=port, log_level="warning", access_log=False)).serve()


async def ask_forever(port: int, until_s: float) -> int:
    """Requests that one kept connection had answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    while time.monotonic() < until_s:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        count += 1
    writer.close()
    return count


async def load(ports: Sequence[int], num_connections: int, seconds: float) -> int:
    until_s = time.monotonic() + seconds
    clients = (ask_forever(ports[index % len(ports)], until_s) for index in range(num_connections))
    return sum(await asyncio.gather(*clients))


def processor_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def block(processes: dict[int, "subprocess.Popen[bytes]"], ports: Sequence[int], options: argparse.Namespace) -> Any:
    """Requests a second through the gateways at `ports`, and microseconds of processor time that they took for one."""
    pids = [processes[port].pid for port in ports]
    before_s, began_s = processor_s(pids), time.monotonic()
    count = asyncio.run(load(ports, options.connections, options.seconds))
    took_s = time.monotonic() - began_s
    return count / took_s, 1e6 * (processor_s(pids) - before_s) / count


def gateways(options: argparse.Namespace) -> dict[str, Any]:
    """One and two gateways in turn, so that what else the machine does meets both."""
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        processes = {}
        for port in ports:
            command = [sys.executable, "-m", "benchmarks.gateway_throughput", "--serve", str(port)]
            process = processes[port] = stack.enter_context(subprocess.Popen(command, cwd=ROOT))
            stack.callback(process.kill)
        wait_for(ports)
        blocks: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for _ in range(options.rounds):
            for num, measured in blocks.items():
                measured.append(block(processes, ports[:num], options))
    return {
        f"{num} gateways": {
            "requests_per_s": round(statistics.median(rate for rate, _ in measured)),
            "processor_us_a_request": round(statistics.median(cost for _, cost in measured)),
        }
        for num, measured in blocks.items()
    }


def wait_for(ports: Sequence[int], patience_s: float = 120.0) -> None:
    until_s = time.monotonic() + patience_s
    for port in ports:
        while True:
            try:
                asyncio.run(load([port], 1, 0.1))
                break
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.2)


def choices(num_choices: int) -> dict[str, float]:
    """Microseconds of processor time of a lease taken and given back, with IN_FLIGHT others under way."""
    source = random.Random(0)
    names = [f"tenant-{number}" for number in range(NUM_ADAPTERS)]
    placement = Placement(PlacementConfig())
    placement.update(names, [replica_record(number) for number in range(NUM_REPLICAS)])
    plan = HomePlan(epoch=1, active=tuple(sorted(names[:2000])), num_homes=dict.fromkeys(names[:NUM_SPREAD], 4))
    placement.hear(FleetPulse(board_id="b", seen=1, plan=plan, in_flight={}, loads={}, residency={}))
    weights = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
    asked = source.choices(names, weights, k=IN_FLIGHT + num_choices)
    leases = [placement.place(name) for name in asked[:IN_FLIGHT]]
    took_ns = []
    for index, name in enumerate(asked[IN_FLIGHT:]):
        began_ns = time.thread_time_ns()
        lease = placement.place(name)
        leases[index % IN_FLIGHT].release()
        took_ns.append(time.thread_time_ns() - began_ns)
        leases[index % IN_FLIGHT] = lease
    took_ns.sort()
    return {
        "mean_us": round(statistics.fmean(took_ns) / 1e3, 1),
        "p50_us": round(took_ns[len(took_ns) // 2] / 1e3, 1),
        "p99_us": round(took_ns[int(0.99 * len(took_ns))] / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--choices", type=int, default=100_000)
    parser.add_argument("--serve", type=int, metavar="PORT", help="only be a gateway")
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    results: dict[str, Any] = {"choice": choices(options.choices), **gateways(options)}
    for name, row in results.items():
        print(f"{name:12} {row}")
    print(save("gateway_throughput", __doc__ or "", vars(options), results))


if __name__ == "__main__":
    main()
