"""How much do different adapters in one batch cost on CPU? Steps a second, as ratios to the base alone.

    python benchmarks/cpu_diversity.py --base ~/.cache/lorafleet/base/SmolLM2-135M-Instruct.Q4_1.gguf

A decode batch of 8 sequences runs with 0, 1, 2, 4 and 8 distinct adapters (rank 16 on every projection), and with one
adapter merged into the weights: the cost of a deployment a tenant. The cases take turns step by step, so that other
load on the machine falls on all of them alike. A ratio is the base's time over the case's: of the medians and of the
lower quartiles by the clock, and of the medians by the processor time of this process.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
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
        segments=tuple(
            LoraSegment(place * share, (place + 1) * share, place, pairs) for place, pairs in enumerate(adapters)
        ),
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
    """Ratios of the medians over all rounds, and of the lower quartiles, which other load disturbs less."""
    base = seconds["0 adapters"]
    return [
        {
            "case": case,
            "steps_per_s": round(1 / statistics.median(v.wall for v in values), 2),
            "ratio": round(statistics.median(b.wall for b in base) / statistics.median(v.wall for v in values), 3),
            "quartile_ratio": round(lower_quartile(base) / lower_quartile(values), 3),
            "cpu_ratio": round(statistics.median(b.cpu for b in base) / statistics.median(v.cpu for v in values), 3),
        }
        for case, values in seconds.items()
    ]


def lower_quartile(values: list[Seconds]) -> float:
    return statistics.quantiles([value.wall for value in values], n=4)[0]


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=os.environ.get("LORAFLEET_BASE", DEFAULT_BASE))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1, help="steps of a case in each round")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    rows = summary(measure(options))
    print(f"{'case':<12} {'steps/s':>8} {'ratio':>7} {'quartile':>9} {'cpu':>7}")
    for row in rows:
        print("{case:<12} {steps_per_s:>8} {ratio:>7} {quartile_ratio:>9} {cpu_ratio:>7}".format(**row))
    conditions = {**vars(options), "base": Path(options.base).name, "batch": BATCH, "targets": "every projection"}
    print(save("cpu_diversity", __doc__ or "", conditions, rows))


if __name__ == "__main__":
    main()
