"""What a real fleet loses when its registry and its replicas are killed (-9) amid uploads, activations, rollbacks and
collections, under traffic: whatever is lost, half-made or answered wrong ends the run with an error.

Run: python -m benchmarks.kills [--registry 20] [--replicas 10]
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.provenance import save
from tests.faults.kills import NAMES, NUM_READERS, run
from tests.fleet_process import REGISTRY, REPLICA
from tests.tiny_models import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = make_model(Path(name) / "tiny-llama")
        results = run(base, Path(name), (REGISTRY,) * options.registry + (REPLICA,) * options.replicas)
    for key, value in results.items():
        print(f"{key:15} {value}")
    conditions = {"replicas": 2, "gateways": 1, "writers": len(NAMES), "readers": NUM_READERS}
    print(save("kills", "What do 30 deaths under load lose?", conditions, results))


if __name__ == "__main__":
    main()
