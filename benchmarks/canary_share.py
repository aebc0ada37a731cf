"""How exact and how sticky a canary is: 5,000 requests of 200 keys through two gateways' catalogs, weight 0.1.

Run: python -m benchmarks.canary_share
"""

import random
import statistics
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import save
from registry.catalog import Catalog
from tests.registry.two_replicas import TwoReplicas

WEIGHT, REQUESTS, KEYS, SETS = 0.1, 5000, 200, 200


def canary_catalogs(folder: Path) -> tuple[Catalog, Catalog]:
    """What two gateways follow of a registry with a canary that was staged and set like any other."""
    setup = TwoReplicas(folder)
    setup.registry.canary("alice", 2, WEIGHT, actor="benchmark")
    setup.settle()
    gateways = (Catalog([]), Catalog([]))
    for gateway in gateways:
        delta = setup.registry.changes(0)
        assert delta is not None
        gateway.apply(delta)
    setup.registry.close()
    return gateways


def run(gateways: Sequence[Catalog], keys: Sequence[str], source: random.Random) -> tuple[float, int]:
    """The share of requests that the canary took, and how many keys saw both versions."""
    seen: dict[str, set[int | None]] = defaultdict(set)
    taken = 0
    for _ in range(REQUESTS):
        key = source.choice(keys)
        number = source.choice(gateways).resolve("default", "alice", key).number
        seen[key].add(number)
        taken += number == 2
    return taken / REQUESTS, sum(len(versions) > 1 for versions in seen.values())


def key_sets(source: random.Random) -> dict[str, list[list[str]]]:
    starts = [source.randrange(10**6) for _ in range(SETS)]
    return {
        "numbered": [[f"user-{number}" for number in range(start, start + KEYS)] for start in starts],
        "random": [[str(uuid.UUID(int=source.getrandbits(128))) for _ in range(KEYS)] for _ in starts],
    }


def main() -> None:
    source = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        gateways = canary_catalogs(Path(folder))
    results = {}
    for kind, sets in key_sets(source).items():
        outcomes = [run(gateways, keys, source) for keys in sets]
        shares = sorted(share * 100 for share, _ in outcomes)
        results[kind] = {
            "share_percent": {
                "min": round(shares[0], 2),
                "mean": round(statistics.mean(shares), 2),
                "max": round(shares[-1], 2),
            },
            "sets_within_2_points": sum(abs(share - WEIGHT * 100) <= 2 for share in shares) / SETS,
            "keys_that_saw_both_versions": sum(mixed for _, mixed in outcomes),
        }
        print(kind, results[kind])
    conditions = {"weight": WEIGHT, "requests": REQUESTS, "keys": KEYS, "sets_of_keys": SETS, "gateways": 2}
    print(save("canary_share", "How exact and how sticky is a canary?", conditions, results))


if __name__ == "__main__":
    main()
