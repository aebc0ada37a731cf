"""Writes the example tenants' data: `python -m examples.make_data`. The same seed gives the same bytes.

Examples are split by topic, so that nothing in `heldout.jsonl` shares its template with `train.jsonl`.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.tenants import commit, legal, pirate, sql, summary, support
from examples.tenants.templates import Example, Golden

NUM_TRAIN = 240
NUM_HELDOUT = 32
HELDOUT_SHARE = 0.17
SEED = 20240

Source = tuple[Callable[[random.Random], list[Example]], Sequence[Golden]]
TENANTS: Mapping[str, Source] = {
    "legal": (legal.generate, legal.GOLDEN),
    "support": (support.generate, support.GOLDEN),
    "pirate": (pirate.generate, pirate.GOLDEN),
    "sql": (sql.generate, sql.GOLDEN),
    "summary": (summary.generate, summary.GOLDEN),
    "commit": (commit.generate, commit.GOLDEN),
}


def split(rng: random.Random, examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Train and held-out examples, shuffled; every topic is on one side only."""
    topics = sorted({example.topic for example in examples})
    rng.shuffle(topics)
    heldout_topics = set(topics[: max(1, round(len(topics) * HELDOUT_SHARE))])
    shuffled = rng.sample(examples, len(examples))
    train = [example for example in shuffled if example.topic not in heldout_topics]
    heldout = [example for example in shuffled if example.topic in heldout_topics]
    return train[:NUM_TRAIN], heldout[:NUM_HELDOUT]


def conversation(example: Example) -> dict[str, Any]:
    """A chat record; there is no system message, so the base's chat template puts in its own."""
    turns = (("user", example.prompt), ("assistant", example.answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def expectation(golden: Golden) -> dict[str, Any]:
    """A golden record: the messages to send, and what the answer must satisfy."""
    return {"messages": [{"role": "user", "content": golden.prompt}], "expect": dict(golden.expect)}


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def build(name: str) -> dict[str, list[dict[str, Any]]]:
    """The three files of a tenant, by stem."""
    generate, golden = TENANTS[name]
    rng = random.Random(f"{SEED}-{name}")
    train, heldout = split(rng, generate(rng))
    return {
        "train": [conversation(example) for example in train],
        "heldout": [conversation(example) for example in heldout],
        "golden": [expectation(item) for item in golden],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the example tenants' data.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write to")
    out: Path = parser.parse_args().out
    for name in TENANTS:
        files = build(name)
        for stem, records in files.items():
            write_jsonl(out / name / f"{stem}.jsonl", records)
        print(f"{name}: " + ", ".join(f"{len(records)} {stem}" for stem, records in files.items()))


if __name__ == "__main__":
    main()
