"""What does a burst of large requests do to quiet tenants? One trace, served with `drr` and with `fcfs`.

    python benchmarks/noisy_neighbour.py

Two quiet tenants send small requests now and then; a third sends bursts of large ones. The real engine over a small
random model on one thread. First-token times are counted in turns of the step loop, which the machine's load does not
change, with seconds beside them; each quiet tenant is also served with nobody else there. Throughput is processor
time a token, in blocks that alternate between the two policies.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from benchmarks.tenant_engine import Arrival, Run, arrival, make_run, quantile  # noqa: E402
from replica.config import ModelConfig, SchedulerConfig  # noqa: E402
from replica.model.base_model import BaseModel  # noqa: E402
from tests.tiny_models import make_model  # noqa: E402

QUIET = ("quiet-1", "quiet-2")
POLICIES = ("drr", "fcfs")
OBJECTIVE_STEPS = 4
"""A quiet request's first token must come within so many turns of the loop."""


@dataclass(frozen=True)
class Mix:
    """The trace, and the engine's limits."""

    num_quiet: int = 120
    quiet_every: float = 12.0
    burst_ticks: tuple[int, ...] = (100, 500, 900)
    burst_size: int = 60
    max_num_seqs: int = 32
    max_batch_tokens: int = 512
    num_blocks: int = 1200
    num_rounds: int = 6
    seed: int = 0

    def trace(self) -> list[Arrival]:
        return [*self.quiet("quiet-1"), *self.quiet("quiet-2"), *self.bursts()]

    def quiet(self, tenant: str) -> Iterator[Arrival]:
        draw, tick = random.Random(f"{tenant}{self.seed}"), 0.0
        for index in range(self.num_quiet):
            tick += draw.expovariate(1 / self.quiet_every)
            yield arrival(int(tick), f"{tenant}-{index}", tenant, draw.randint(20, 100), draw.randint(8, 24))

    def bursts(self) -> Iterator[Arrival]:
        draw = random.Random(self.seed)
        for tick in self.burst_ticks:
            for index in range(self.burst_size):
                sizes = draw.randint(200, 400), draw.randint(64, 128)
                yield arrival(tick, f"noisy-{tick}-{index}", "noisy", *sizes)


def make_base(folder: Path) -> BaseModel:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 1024}
    make_model(folder, "llama", **sizes)
    return BaseModel.load(ModelConfig(base=str(folder), device="cpu", num_threads=1))


def serve(mix: Mix, policy: str, base: BaseModel, trace: Iterable[Arrival]) -> tuple[Run, float]:
    """The served trace and its processor seconds a token."""
    config = SchedulerConfig(
        policy=policy,  # type: ignore[arg-type]
        max_num_seqs=mix.max_num_seqs,
        max_batch_tokens=mix.max_batch_tokens,
    )
    base.allocate_kv(mix.num_blocks, config.block_size)
    run = make_run(config, mix.num_blocks, model=base)
    started_s = time.process_time()
    with torch.inference_mode():
        run.serve(trace)
    return run, (time.process_time() - started_s) / sum(run.service.values())


def summary(run: Run, tenant: str) -> dict[str, float]:
    records = [record for record in run.records.values() if record.tenant == tenant]
    steps = [float(record.steps_to_first) for record in records]
    waits_ms = [1e3 * (record.first_s - record.submitted_s) for record in records]
    within = sum(each <= OBJECTIVE_STEPS for each in steps) / len(steps)
    found = {"requests": len(records), "within_objective": round(within, 4), "steps_max": max(steps)}
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        found[f"steps_{name}"] = quantile(steps, q)
        found[f"ms_{name}"] = round(quantile(waits_ms, q), 1)
    return found


def measure(mix: Mix, base: BaseModel) -> dict[str, Any]:
    trace = mix.trace()
    cpu_us: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    runs: dict[str, Run] = {}
    for index in range(mix.num_rounds):
        for policy in POLICIES if index % 2 else reversed(POLICIES):
            runs[policy], seconds = serve(mix, policy, base, trace)
            cpu_us[policy].append(1e6 * seconds)
    alone = {tenant: summary(serve(mix, "drr", base, mix.quiet(tenant))[0], tenant) for tenant in QUIET}
    ratios = [fcfs / drr for drr, fcfs in zip(cpu_us["drr"], cpu_us["fcfs"], strict=True)]
    return {
        "alone": alone,
        **{policy: {name: summary(runs[policy], name) for name in (*QUIET, "noisy")} for policy in POLICIES},
        "engine": {
            policy: {"steps": run.busy_ticks, "preemptions": run.engine.counts.num_preemptions,
                     "pauses": run.engine.counts.num_pauses}
            for policy, run in runs.items()
        },
        "cpu_us_per_token": {policy: [round(each, 1) for each in found] for policy, found in cpu_us.items()},
        "throughput_of_drr": round(statistics.median(ratios), 4),
        "quiet_p99_of_alone": {
            policy: max(summary(runs[policy], name)["steps_p99"] / alone[name]["steps_p99"] for name in QUIET)
            for policy in POLICIES
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Mix.num_rounds)
    mix = Mix(num_rounds=parser.parse_args().rounds)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(mix, make_base(Path(folder)))
    for name in ("alone", *POLICIES):
        for tenant, found in results[name].items():
            print(f"{name:6} {tenant:8} {found}")
    print({key: results[key] for key in ("engine", "cpu_us_per_token", "throughput_of_drr", "quiet_p99_of_alone")})
    print(save("noisy_neighbour", str(__doc__), asdict(mix) | {"objective_steps": OBJECTIVE_STEPS}, results))


if __name__ == "__main__":
    main()
