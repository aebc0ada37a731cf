"""Does a tenant at two replicas get a multiple of its share?

    python benchmarks/fleet_share.py

Two engines in one process, in step. Tenant `left` has its adapter on the first replica only, `right` on the second
only, and `both` is sent to either in turn; all three are backlogged throughout, with equal weights. Served once with
each request's `spread` as a gateway sees it (replicas at which its tenant has requests), once with `spread` 1.
"""

import argparse
import sys
from pathlib import Path
from random import Random

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from benchmarks.tenant_engine import Run, arrival, make_run  # noqa: E402
from replica.config import SchedulerConfig  # noqa: E402

HOMES = {"left": (0,), "right": (1,), "both": (0, 1)}


def share(num_ticks: int, with_hint: bool, seed: int = 0) -> dict[str, float]:
    """Each tenant's part of all that both replicas served, and its parts at each."""
    config = SchedulerConfig(max_num_seqs=16, max_batch_tokens=256, max_waiting=100_000)
    runs = [make_run(config, 800) for _ in range(2)]
    draw = Random(seed)
    with torch.inference_mode():
        for tick in range(num_ticks):
            for tenant, homes in HOMES.items():
                for home in homes:
                    _top_up(runs[home], tenant, tick, len(homes) if with_hint else 1, draw)
            for run in runs:
                run.step()
    total = sum(sum(run.service.values()) for run in runs)
    served = {tenant: sum(run.service[tenant] for run in runs) / total for tenant in HOMES}
    here = {f"both at {index}": run.service["both"] / sum(run.service.values()) for index, run in enumerate(runs)}
    return {name: round(part, 4) for name, part in (served | here).items()}


def _top_up(run: Run, tenant: str, tick: int, spread: int, draw: Random) -> None:
    """Keep eight requests waiting, so that the tenant is backlogged here."""
    for index in range(8 - run.waiting()[tenant]):
        sizes = draw.randint(16, 64), draw.randint(16, 64)
        run.submit(arrival(tick, f"{tenant}-{tick}-{index}", tenant, *sizes, spread=spread).request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, with_hint in (("with spread", True), ("without", False)):
        found = share(options.ticks, with_hint)
        found["both_of_least"] = round(found["both"] / min(found["left"], found["right"]), 3)
        results[name] = found
        print(f"{name:12} {found}")
    print(save("fleet_share", str(__doc__), vars(options), results))


if __name__ == "__main__":
    main()
