"""Pushes one new version after another and prints each acknowledgement, until it is killed."""

import sys
import time
from pathlib import Path

from tests.registry.uploads import make_base, open_registry, plain_upload


def main(folder: Path, first_seed: int) -> None:
    registry = open_registry(folder / "data", time.time)
    base = make_base()
    registry.publish_base(base, actor="pusher")
    for seed in range(first_seed, first_seed + 100_000):
        result = registry.push("alice", plain_upload(folder / f"u{first_seed}", base, seed), owner="o")
        print(result.version.number, result.version.digest, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
