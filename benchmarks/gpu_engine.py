"""What do adapters in a batch cost on a GPU? Output tokens a second of the engine, against its base alone.

    python -m benchmarks.gpu_engine --out DIR [--parts base,lora,steps,prefill] [--shape tiny --device cpu]

Llama-3.1-8B shape with random bf16 weights, 64 adapters of rank 16 on all seven projections in the arena; 64 requests,
prompt 128, output 256, greedy. The cases of one run take turns, so that their ratios share whatever else there was.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_fixture import Rig, Sizes, arguments, build, chosen_parts, run_requests  # noqa: E402
from benchmarks.provenance import commit  # noqa: E402
from replica.engine import Engine  # noqa: E402
from replica.model.batch import ForwardBatch, LoraSegment, SequenceSpan  # noqa: E402

PARTS = ("base", "lora", "steps", "prefill")
ADAPTER_COUNTS = (1, 8, 32, 64)
VLLM = {0: 1.0, 1: 0.77, 8: 0.60, 32: 0.31, 64: 0.20}
"""vLLM 0.25.1 on the same GPU and work: adapters in the batch -> share of its own base."""


@dataclass(frozen=True)
class Work:
    """The requests of a case, and how often it is measured."""

    num_requests: int = 64
    num_prompt: int = 128
    num_output: int = 256
    num_long: int = 8
    num_long_prompt: int = 2048
    repeats: int = 3


WORKS = {"llama-8b": Work(), "tiny": Work(8, 16, 8, 2, 64, 2)}
SIZES = {
    "llama-8b": Sizes(),
    "tiny": Sizes(shape="tiny", num_adapters=8, rank=4, max_num_seqs=8, max_batch_tokens=128, num_kv_blocks=256),
}


class Bench:
    """One rig and one engine; every method measures something and returns plain values."""

    def __init__(self, rig: Rig, engine: Engine, work: Work) -> None:
        self.rig, self.engine, self.work = rig, engine, work
        self.counts = [count for count in ADAPTER_COUNTS if count <= rig.sizes.num_adapters]
        self._random = random.Random(0)

    def throughput(self, counts: Sequence[int]) -> list[dict[str, Any]]:
        """Output tokens a second for each number of adapters (0: base), medians, and ratios to the base."""
        took_s: dict[int, list[float]] = {count: [] for count in counts}
        host: dict[int, dict[str, float]] = {}
        for turn in range(self.work.repeats + 1):
            for count in counts:
                seconds, host[count] = self._generate(count)
                if turn:
                    took_s[count].append(seconds)
        num_tokens = self.work.num_requests * self.work.num_output
        medians = {count: statistics.median(values) for count, values in took_s.items()}
        return [
            {
                "adapters": count,
                "tokens_per_s": round(num_tokens / medians[count], 1),
                "ratio": round(medians[counts[0]] / medians[count], 4),
                "seconds": [round(value, 4) for value in took_s[count]],
                "host_ms_per_step": host[count],
            }
            for count in counts
        ]

    def _generate(self, count: int) -> tuple[float, dict[str, float]]:
        times = self.rig.base.host_times
        times.reset()
        prompts = self._prompts(self.work.num_requests, self.work.num_prompt)
        seconds = run_requests(self.engine, prompts, self._digests(len(prompts), count), self.work.num_output)
        return seconds, {name: round(value, 4) for name, value in times.milliseconds().items()}

    def prefill(self, num_adapters: int) -> list[dict[str, Any]]:
        """Long prompts, one token each: base and adapters in turn."""
        took_s: dict[int, list[float]] = {0: [], num_adapters: []}
        for turn in range(3 * self.work.repeats + 1):
            for count, values in took_s.items():
                prompts = self._prompts(self.work.num_long, self.work.num_long_prompt)
                seconds = run_requests(self.engine, prompts, self._digests(len(prompts), count), 1)
                if turn:
                    values.append(seconds)
        base_s = statistics.median(took_s[0])
        num_tokens = self.work.num_long * self.work.num_long_prompt
        return [
            {
                "adapters": count,
                "seconds": round(statistics.median(values), 4),
                "prompt_tokens_per_s": round(num_tokens / statistics.median(values)),
                "ratio": round(base_s / statistics.median(values), 4),
            }
            for count, values in took_s.items()
        ]

    def steps(self, context: int = 256) -> list[dict[str, Any]]:
        """One decode step at a time: the whole call, the device's share of it, and the host's. The engine is idle."""
        return [
            {"adapters": count, **_time_step(self.rig, self._decode_batch(count, context))}
            for count in (0, *self.counts)
        ]

    def _decode_batch(self, count: int, context: int) -> ForwardBatch:
        sizes, device = self.rig.sizes, self.rig.base.device
        num_rows, pages = sizes.max_num_seqs, -(-context // sizes.block_size)
        blocks = self._random.sample(range(sizes.num_kv_blocks), num_rows * pages)
        return ForwardBatch(
            token_ids=torch.arange(num_rows, device=device) + 5,
            positions=torch.full((num_rows,), context - 1, device=device),
            spans=tuple(
                SequenceSpan(1, context, tuple(blocks[row * pages : (row + 1) * pages])) for row in range(num_rows)
            ),
            logit_rows=torch.arange(num_rows, device=device),
            segments=self._segments(num_rows, count),
        )

    def _segments(self, num_rows: int, count: int) -> tuple[LoraSegment, ...]:
        leases = list(self.rig.adapters.leases.values())[:count]
        bounds = [round(place * num_rows / count) for place in range(count + 1)] if count else []
        return tuple(
            LoraSegment(bounds[place], bounds[place + 1], lease.slot, lease.pairs) for place, lease in enumerate(leases)
        )

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        vocab = self.rig.base.vocab_size
        return [[self._random.randrange(2, vocab) for _ in range(length)] for _ in range(count)]

    def _digests(self, num_requests: int, count: int) -> list[str | None]:
        return [f"a{index % count}" if count else None for index in range(num_requests)]


def _time_step(rig: Rig, batch: ForwardBatch, num_steps: int = 50) -> dict[str, float]:
    """Milliseconds: `call` with one step after another, `gpu` of the device alone, and what the host did."""
    with torch.inference_mode():
        for _ in range(5):
            rig.base.forward(batch)
        _synchronise(rig)
        rig.base.host_times.reset()
        started_s = time.perf_counter()
        for _ in range(num_steps):
            rig.base.forward(batch)
        _synchronise(rig)
        call_ms = (time.perf_counter() - started_s) * 1e3 / num_steps
        host = rig.base.host_times.milliseconds()
        gpu_ms = _gpu_ms(rig, len(batch.spans), rig.sizes.rank if batch.segments else 0, num_steps)
    return {name: round(value, 4) for name, value in {"call_ms": call_ms, "gpu_ms": gpu_ms, **host}.items()}


def _gpu_ms(rig: Rig, num_rows: int, max_rank: int, num_steps: int) -> float:
    """Replays of the last step's graph, back to back, between two events; 0 where there are none."""
    if rig.base.device.type != "cuda":
        return 0.0
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before = torch.cuda.memory_allocated()
    first.record()
    for _ in range(num_steps):
        rig.base.replay(num_rows, max_rank)
    last.record()
    last.synchronize()
    assert torch.cuda.memory_allocated() == before, "a replay allocated memory"
    return first.elapsed_time(last) / num_steps


def _synchronise(rig: Rig) -> None:
    if rig.base.device.type == "cuda":
        torch.cuda.synchronize()


def measure(sizes: Sizes, work: Work, device: str, parts: Sequence[str], fields: dict[str, Any]) -> dict[str, Any]:
    rig = build(sizes, device, **fields)
    print(f"start: {asdict(rig.start)}", flush=True)
    results: dict[str, Any] = {"start": asdict(rig.start), "image_bytes": rig.adapters.num_image_bytes}
    with rig.engine() as engine:
        bench = Bench(rig, engine, work)
        if "steps" in parts:
            results["steps"] = show("decode steps", bench.steps())
        if "base" in parts or "lora" in parts:
            counts = [0, *bench.counts] if "lora" in parts else [0]
            results["throughput"] = show("throughput", bench.throughput(counts))
        if "prefill" in parts:
            results["prefill"] = show("prefill", bench.prefill(min(8, sizes.num_adapters)))
    if rig.base.device.type == "cuda":
        results["peak_bytes"] = torch.cuda.max_memory_allocated()
    return results


def show(title: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print rows as a table, as soon as they are known; returns them."""
    print(f"\n{title}")
    names = list(rows[0])
    table = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(names))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()
    return rows


def where() -> dict[str, Any]:
    """Device, versions and commit."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "commit": commit(), **{name: _version(name) for name in PACKAGES}}


PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def plot(results: dict[str, Any], path: Path) -> None:
    """Share of base throughput against adapters in the batch, with vLLM's."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in results["throughput"] if row["adapters"]]
    labels = [str(row["adapters"]) for row in rows]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(labels, [row["ratio"] for row in rows], marker="o", label="lorafleet")
    axes.plot(labels, [VLLM[row["adapters"]] for row in rows], marker="s", label="vLLM 0.25.1")
    axes.set(xlabel="adapters in a batch of 64", ylabel="share of base throughput", ylim=(0, 1.05))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, PARTS)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--max-rank", type=int, help="the largest rank that is allowed; by default the adapters' own")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the model config")
    return parser.parse_args()


def main() -> None:
    options = parse()
    parts = chosen_parts(options.parts, PARTS)
    work = WORKS[options.shape]
    work = work if options.repeats is None else replace(work, repeats=options.repeats)
    sizes = replace(SIZES[options.shape], max_rank=options.max_rank)
    fields = dict(assignment.split("=", 1) for assignment in options.set)
    print(where(), flush=True)
    results = measure(sizes, work, options.device, parts, fields)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {**where(), "sizes": asdict(sizes), "work": asdict(work), "set": fields, **results}
    (options.out / "gpu_engine.json").write_text(json.dumps(record, indent=2) + "\n")
    if "throughput" in results and len(results["throughput"]) > 1:
        plot(results, options.out / "gpu_engine.png")


if __name__ == "__main__":
    main()
