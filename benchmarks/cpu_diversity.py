"""How much do different adapters in one batch cost on CPU? Steps a second, as ratios to the base alone.

    python benchmarks/cpu_diversity.py --base ~/.cache/lorafleet/base/SmolLM2-135M-Instruct.Q4_1.gguf

A decode batch of 8 sequences runs with 0, 1, 2, 4 and 8 distinct adapters (rank 16 on every projection), and with one
adapter merged into the weights: the cost of a deployment a tenant. The cases take turns in short blocks, so that other
load on the machine falls on all of them alike; a ratio is the median over the rounds of (base block / case block), once
by the clock and once by the processor time of this process, which other load disturbs less.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from replica.config import ModelConfig  # noqa: E402
from replica.model.base_model import BaseModel  # noqa: E402
from replica.model.batch import ForwardBatch, LoraPair, LoraSegment, SequenceSpan  # noqa: E402

BATCH = 8
BLOCK_SIZE = 16
ADAPTER_COUNTS = (0, 1, 2, 4, 8)
DEFAULT_BASE = "~/.cache/lorafleet/base/SmolLM2-135M-Instruct.Q4_1.gguf"

Pairs = dict[int, LoraPair]


@dataclass(frozen=True)
class Options:
    base: str
    threads: int
    context: int
    rank: int
    rounds: int
    steps: int
    out: Path


def random_adapter(base: BaseModel, rank: int, seed: int) -> Pairs:
    """Pairs for every site, small enough that activations stay ordinary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.01).to(base.dtype)

    return {
        site.index: LoraPair(draw(rank, site.in_features), draw(site.out_features, rank), 2.0) for site in base.sites
    }


def decode_batch(context: int, adapters: list[Pairs]) -> ForwardBatch:
    """One decode step of 8 sequences of `context` tokens, the adapters spread evenly over the rows."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(BATCH * blocks, generator=torch.Generator().manual_seed(0)).view(BATCH, blocks).tolist()
    share = BATCH // len(adapters) if adapters else BATCH
    return ForwardBatch(
        token_ids=torch.arange(100, 100 + BATCH),
        positions=torch.full((BATCH,), context - 1),
        spans=tuple(SequenceSpan(1, context, tuple(table)) for table in tables),
        logit_rows=torch.arange(BATCH),
        segments=tuple(LoraSegment(place * share, (place + 1) * share, pairs) for place, pairs in enumerate(adapters)),
    )


def merge(base: BaseModel, pairs: Pairs, sign: float) -> None:
    """Add (or take away) an adapter's deltas to the base's own weights."""
    for site in base.sites:
        weight = base._model.get_submodule(site.path).base_layer.weight
        pair = pairs[site.index]
        weight.data.add_(pair.b @ pair.a, alpha=sign * pair.scale)


@dataclass(frozen=True)
class Seconds:
    """What a step took: by the clock, and of processor time."""

    wall: float
    cpu: float


def measure(options: Options) -> dict[str, list[Seconds]]:
    """One figure a round, for every case."""
    base = BaseModel.load(ModelConfig(base=options.base, device="cpu", num_threads=options.threads))
    base.allocate_kv(BATCH * -(-options.context // BLOCK_SIZE), BLOCK_SIZE)
    adapters = [random_adapter(base, options.rank, seed) for seed in range(max(ADAPTER_COUNTS))]
    batches = {f"{count} adapters": decode_batch(options.context, adapters[:count]) for count in ADAPTER_COUNTS}
    seconds: dict[str, list[Seconds]] = {case: [] for case in (*batches, "merged")}
    for batch in batches.values():
        base.forward(batch)
    for _ in range(options.rounds):
        for case, batch in batches.items():
            seconds[case].append(time_steps(lambda batch=batch: base.forward(batch), options.steps))
        merge(base, adapters[0], 1.0)
        seconds["merged"].append(time_steps(lambda: base.forward(batches["0 adapters"]), options.steps))
        merge(base, adapters[0], -1.0)
    return seconds


def time_steps(step: Callable[[], object], count: int) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return Seconds((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count)


def summary(seconds: dict[str, list[Seconds]]) -> list[dict[str, float | str]]:
    base = seconds["0 adapters"]
    rows: list[dict[str, float | str]] = []
    for case, values in seconds.items():
        wall = [b.wall / v.wall for b, v in zip(base, values, strict=True)]
        cpu = [b.cpu / v.cpu for b, v in zip(base, values, strict=True)]
        rows.append(
            {
                "case": case,
                "steps_per_s": round(1 / statistics.median(v.wall for v in values), 2),
                "ratio": round(statistics.median(wall), 3),
                "lowest": round(min(wall), 3),
                "highest": round(max(wall), 3),
                "cpu_ratio": round(statistics.median(cpu), 3),
            }
        )
    return rows


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def report(options: Options, rows: list[dict[str, float | str]]) -> dict[str, object]:
    return {
        "question": "cost of distinct adapters in a decode batch of 8 on CPU",
        "base": Path(options.base).name,
        "threads": options.threads,
        "context": options.context,
        "rank": options.rank,
        "targets": "every projection",
        "rounds": options.rounds,
        "steps_a_round": options.steps,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit(),
        "results": rows,
    }


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=os.environ.get("LORAFLEET_BASE", DEFAULT_BASE))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps of a case in each round")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_diversity.json")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    rows = summary(measure(options))
    print(f"{'case':<12} {'steps/s':>8} {'ratio':>7} {'lowest':>7} {'highest':>8} {'cpu ratio':>10}")
    for row in rows:
        print("{case:<12} {steps_per_s:>8} {ratio:>7} {lowest:>7} {highest:>8} {cpu_ratio:>10}".format(**row))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report(options, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
