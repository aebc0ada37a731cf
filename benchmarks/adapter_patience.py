"""What does patience buy? Distinct adapters a step, throughput and queue wait against `scheduler.adapter_patience_s`.

    python -m benchmarks.adapter_patience --out DIR [--distinct-ms 0.027] [--load 1.1]

The real queue, admission and step loop over a model that takes no time: a clock of its own moves on by what a step
costs on a GPU (`--step-ms`, and `--distinct-ms` for each adapter in it). Zipf adapters, Poisson arrivals.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402
from replica.config import SchedulerConfig  # noqa: E402
from replica.engine import Engine  # noqa: E402
from replica.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk  # noqa: E402
from replica.model.batch import ForwardBatch  # noqa: E402
from replica.sequence import RequestGroup  # noqa: E402
from tests.fakes import FakeAdapters, PacedModel, base_spec  # noqa: E402

PATIENCES_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Mix:
    """The requests, and what a step costs. `load` is arrivals against what full steps of all rows could serve."""

    num_requests: int = 2000
    num_adapters: int = 256
    exponent: float = 1.0
    num_tenants: int = 8
    num_prompt: int = 32
    num_output: int = 64
    max_num_seqs: int = 64
    step_ms: float = 6.2
    distinct_ms: float = 0.027
    load: float = 1.1
    policy: str = "drr"
    seed: int = 0

    @property
    def rate(self) -> float:
        """Requests a second."""
        full_step_s = (self.step_ms + self.distinct_ms * self.max_num_seqs / 2) / 1e3
        return self.load * self.max_num_seqs / (self.num_output * full_step_s)


class Clock:
    """Seconds that pass only when a step runs or nothing is there to do."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedModel(PacedModel):
    """Moves a clock instead of sleeping."""

    def __init__(self, mix: Mix, clock: Clock) -> None:
        super().__init__(base_spec(), step_s=0.0)
        self._mix, self._clock = mix, clock

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self._clock.now_s += (self._mix.step_ms + self._mix.distinct_ms * len(batch.segments)) / 1e3
        return super().forward(batch)


class Watch:
    """What the engine tells: waits, and distinct adapters of each step."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.distinct: list[int] = []
        self.num_ended = 0

    def on_start(self, group: RequestGroup, waited_s: float) -> None:
        self.waits_s.append(waited_s)

    def on_step(self, batch: ForwardBatch, took_s: float) -> None:
        self.distinct.append(len(batch.segments))

    def on_end(self, reason: FinishReason) -> None:
        self.num_ended += 1

    def on_withdrawn(self, digest: str) -> None: ...

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.error is not None:
                raise chunk.error


def arrivals(mix: Mix) -> list[tuple[float, GenerateRequest]]:
    """Each request with the second of its arrival."""
    draw = random.Random(mix.seed)
    names = [f"adapter{index}" for index in range(mix.num_adapters)]
    weights = [1 / (rank + 1) ** mix.exponent for rank in range(mix.num_adapters)]
    sampling = SamplingParams(max_tokens=mix.num_output, temperature=0.0, ignore_eos=True)
    found, now_s = [], 0.0
    for index, adapter in enumerate(draw.choices(names, weights, k=mix.num_requests)):
        now_s += draw.expovariate(mix.rate)
        tenant = f"tenant{names.index(adapter) % mix.num_tenants}"
        found.append((now_s, GenerateRequest(f"r{index}", tenant, adapter, (1,) * mix.num_prompt, sampling)))
    return found


def run(mix: Mix, patience_s: float) -> dict[str, float]:
    """Serve the mix with one setting."""
    clock, watch = Clock(), Watch()
    adapters = FakeAdapters(mix.max_num_seqs, load_polls=1)
    config = SchedulerConfig(
        policy=mix.policy,  # type: ignore[arg-type]
        max_num_seqs=mix.max_num_seqs,
        max_waiting=mix.num_requests,
        adapter_patience_s=patience_s,
    )
    num_blocks = 2 * mix.max_num_seqs * (mix.num_prompt + mix.num_output) // config.block_size
    engine = Engine(
        TimedModel(mix, clock), adapters, config, watch, num_blocks=num_blocks, num_slots=mix.max_num_seqs, clock=clock
    )
    coming = arrivals(mix)
    coming.reverse()
    while coming or watch.num_ended < mix.num_requests:
        while coming and coming[-1][0] <= clock.now_s:
            engine.submit(coming.pop()[1], watch)
        before_s = clock.now_s
        engine._step()
        if clock.now_s == before_s and coming and not adapters.num_waiting:
            clock.now_s = max(clock.now_s, coming[-1][0])
    return summary(mix, patience_s, watch, clock.now_s)


def summary(mix: Mix, patience_s: float, watch: Watch, took_s: float) -> dict[str, float]:
    waits = statistics.quantiles(watch.waits_s, n=100)
    return {
        "patience_s": patience_s,
        "distinct_per_step": round(statistics.mean(watch.distinct), 2),
        "tokens_per_s": round(mix.num_requests * mix.num_output / took_s, 1),
        "wait_p50_s": round(waits[49], 3),
        "wait_p99_s": round(waits[98], 3),
        "wait_max_s": round(max(watch.waits_s), 3),
    }


def plot(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Two panels over patience: distinct adapters with throughput, and waits."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    labels = [f"{row['patience_s']:g}" for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.plot(labels, [row["distinct_per_step"] for row in rows], marker="o", color="C0")
    left.set(xlabel="adapter_patience_s", ylabel="distinct adapters a step")
    throughput = left.twinx()
    throughput.plot(labels, [row["tokens_per_s"] for row in rows], marker="s", color="C1")
    throughput.set_ylabel("output tokens a second", color="C1")
    for name in ("wait_p50_s", "wait_p99_s", "wait_max_s"):
        right.plot(labels, [row[name] for row in rows], marker="o", label=name)
    right.set(xlabel="adapter_patience_s", ylabel="seconds in the queue")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse() -> tuple[Mix, Path]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in asdict(Mix()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    out = options.pop("out")
    return replace(Mix(), **options), out


def main() -> None:
    torch.set_num_threads(1)
    mix, out = parse()
    rows: list[dict[str, Any]] = []
    for patience_s in PATIENCES_S:
        rows.append(run(mix, patience_s))
        if len(rows) == 1:
            print("  ".join(f"{name:>18}" for name in rows[0]))
        print("  ".join(f"{value:18g}" for value in rows[-1].values()), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    record = {"question": __doc__, "conditions": asdict(mix), **provenance(), "results": rows}
    (out / "adapter_patience.json").write_text(json.dumps(record, indent=2) + "\n")
    plot(rows, out / "adapter_patience.png")


if __name__ == "__main__":
    main()
