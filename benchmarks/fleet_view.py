"""What does a look at the fleet cost, and how large is the answer, by the number of adapters in use?

    python -m benchmarks.fleet_view

One gateway in this process, every adapter with calls of its own; replicas answer with a text like theirs. Processor
time of one report after another, everything in it: the gateway's own text, parsing, windows, sections, JSON.
"""

import asyncio
import json
import statistics
import time
from typing import Any

from benchmarks.provenance import save
from router.view import fleet_view
from router.view.fleet_view import FleetView
from telemetry import catalogue
from telemetry.exporter import Exporter
from tests.router.support import Stack, adapter_record, delta, running

SIZES = (100, 1000, 5000)
NUM_REPLICAS = 4
NUM_TENANTS = 50
NUM_REPORTS = 7


def replica_text(names: list[str]) -> bytes:
    """What a replica says that serves all of them."""
    exporter = Exporter(catalogue.REPLICA)
    waits = exporter.histogram(catalogue.QUEUE_WAIT_S)
    service = exporter.counter(catalogue.TENANT_SERVICE)
    for name in names:
        waits.labels(name, "1").observe(0.01)
    for tenant in range(NUM_TENANTS):
        service.labels(f"tenant-{tenant}").inc(100)
    return exporter.render()


def serve_one_each(stack: Stack, names: list[str]) -> None:
    for number, name in enumerate(names):
        resolution = stack.gateway.catalog.resolve("default", name)
        with stack.gateway.metrics.meter(resolution, f"tenant-{number % NUM_TENANTS}", 5) as meter:
            meter.pace().arrived(9, 1)


async def measure(num_adapters: int) -> dict[str, Any]:
    names = [f"adapter-{index:05}-of-somebody" for index in range(num_adapters)]
    async with running(catalog=delta([adapter_record(name) for name in names], num_replicas=NUM_REPLICAS)) as stack:
        stack.registry.reported = stack.gateway.catalog.replicas
        stack.fleet.texts = dict.fromkeys((f"r{index}" for index in range(NUM_REPLICAS)), replica_text(names))
        now_s = 0.0  # moved on by each report's period
        view = FleetView(stack.gateway, "gateway", clock=lambda: now_s)
        cpu_s: list[float] = []
        for _ in range(NUM_REPORTS):
            serve_one_each(stack, names)
            now_s += view.period_s
            began_s = time.process_time()
            report = await view.report(limit=1000, with_events=True)
            text = report.model_dump_json()
            cpu_s.append(time.process_time() - began_s)
        objects = [row._asdict() for row in report.adapters.rows]
        rows = [list(row) for row in report.adapters.rows]
        return {
            "report_bytes": len(text),
            "rows_bytes": len(json.dumps(rows)),
            "rows_as_objects_bytes": len(json.dumps(objects)),
            "scraped_bytes": sum(map(len, (await stack.gateway.expositions()).values())),
            "cpu_s": round(statistics.median(cpu_s[1:]), 4),
        }


async def main() -> None:
    fleet_view.FIRST_S = 0.0
    results = {str(size): await measure(size) for size in SIZES}
    for size, found in results.items():
        print(size, found)
    conditions = {"replicas": NUM_REPLICAS, "tenants": NUM_TENANTS, "reports": NUM_REPORTS, "limit": 1000}
    print(save("fleet_view", str(__doc__), conditions, results))


if __name__ == "__main__":
    asyncio.run(main())
