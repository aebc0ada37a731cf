"""How many answers come from the wrong version while uploads move an alias under traffic: 10,000 on two replicas in one
process whose slots are fewer than the versions, and with --fleet as many as asked for on a real fleet.

Run: python -m benchmarks.reload_race [--requests 10000] [--fleet 1000]
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from benchmarks.provenance import save
from tests.fleet_process import FleetProcess
from tests.reload_race import NUM_CLIENTS, NUM_CONTENTS, NUM_SLOTS, in_one_process, over_http
from tests.tiny_models import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--fleet", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = make_model(Path(name) / "tiny-llama")
        results = {"one_process": asyncio.run(in_one_process(base, Path(name) / "local", options.requests))}
        print(results, flush=True)
        if options.fleet:
            slots = {"adapters": {"max_slots": NUM_SLOTS}}
            with FleetProcess(str(base), replica=slots) as fleet:
                results["real_fleet"] = asyncio.run(over_http(fleet.url, base, Path(name) / "fleet", options.fleet))
            print(results["real_fleet"])
    conditions = {"replicas": 2, "slots": NUM_SLOTS, "contents": NUM_CONTENTS, "clients": NUM_CLIENTS}
    print(save("reload_race", "How many answers come from the wrong version?", conditions, results))


if __name__ == "__main__":
    main()
