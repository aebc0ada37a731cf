"""Hands over one batch of use after another and prints each acknowledgement, until it is killed."""

import sys
from pathlib import Path

from registry.usage_records import UsageBatch, UsageEntry
from tests.registry.uploads import open_registry

SOURCE = "sender"
NOW_S = 7200.0


def batch(sequence: int) -> UsageBatch:
    """One request of `sequence` tokens."""
    entry = UsageEntry(hour_s=3600, tenant="t", name="a", number=1, digest="d", requests=1, output_tokens=sequence)
    return UsageBatch(source=SOURCE, sequence=sequence, entries=(entry,))


def main(folder: Path) -> None:
    registry = open_registry(folder, lambda: NOW_S)
    for sequence in range(1, 100_000):
        print(registry.usage.take(batch(sequence)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
