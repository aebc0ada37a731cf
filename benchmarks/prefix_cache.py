"""What does the prefix cache save where prompts begin alike, and what does it cost where none do?

    python benchmarks/prefix_cache.py

The real engine, stepped by hand on one thread, over a random base of SmolLM2-135M's shape; blocks with the cache on and
off alternate, and every figure is a ratio of neighbours. *Shared*: requests of one tenant, one after another, whose
prompts are the same 1,000 tokens and some of their own. *Apart*: prompts that have nothing in common, 16 at a time. The
cost for each token is also measured over a model that takes no time, where it is all there is.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from benchmarks.tenant_engine import Arrival, FreeModel, Run, make_run  # noqa: E402
from replica.config import ModelConfig, SchedulerConfig  # noqa: E402
from replica.messages import GenerateRequest, SamplingParams  # noqa: E402
from replica.model.base_model import BaseModel  # noqa: E402
from replica.step import StepModel  # noqa: E402
from tests.tiny_models import make_model  # noqa: E402

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "vocab_size": 49152,
}
MODES = ("on", "off")
MANY_ROWS = 32


@dataclass(frozen=True)
class Mix:
    """The traces, and the engine's limits."""

    num_layers: int = 30
    num_shared: int = 1000
    num_own: int = 40
    num_output: int = 16
    num_requests: int = 4
    num_apart: int = 16
    num_free: int = 400
    num_rounds: int = 5
    max_batch_tokens: int = 512
    num_blocks: int = 600

    def shared(self, seed: int) -> list[GenerateRequest]:
        draw = random.Random(seed)
        start = draw.choices(range(1000), k=self.num_shared)
        return [
            request(f"s{index}", start + draw.choices(range(1000), k=self.num_own), self.num_output)
            for index in range(self.num_requests)
        ]

    def apart(self, seed: int, number: int, top: int) -> list[GenerateRequest]:
        draw = random.Random(seed)
        sizes = [(draw.randint(64, 256), draw.randint(16, 48)) for _ in range(number)]
        return [
            request(f"a{index}", draw.choices(range(top), k=num_prompt), num_output)
            for index, (num_prompt, num_output) in enumerate(sizes)
        ]


def request(name: str, prompt: Sequence[int], num_output: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, "t", None, tuple(prompt), sampling)


def new_run(mix: Mix, model: StepModel, mode: str, *, max_num_seqs: int = 16) -> Run:
    config = SchedulerConfig(
        prefix_cache=mode == "on", max_num_seqs=max_num_seqs, max_batch_tokens=mix.max_batch_tokens, max_waiting=10_000
    )
    model.allocate_kv(mix.num_blocks, config.block_size)
    return make_run(config, mix.num_blocks, model=model)


def one_by_one(mix: Mix, model: StepModel, mode: str, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """First-token times, wall clock and processor, of requests that each come after the one before has ended."""
    run = new_run(mix, model, mode)
    first_s, first_cpu_s, began_s = [], [], time.process_time()
    with torch.inference_mode():
        for each in requests:
            run.submit(each)
            at_s = time.process_time()
            while run.records[each.request_id].first_tick < 0:
                run.step()
            first_cpu_s.append(time.process_time() - at_s)
            first_s.append(run.records[each.request_id].first_s - run.records[each.request_id].submitted_s)
            run.serve([])
    found = run.engine.counts.num_found_tokens
    return {"first_s": first_s, "first_cpu_s": first_cpu_s, "cpu_s": time.process_time() - began_s, "found": found}


def together(mix: Mix, model: StepModel, mode: str, requests: Sequence[GenerateRequest]) -> float:
    """Processor seconds a token of requests that are all there at once."""
    run = new_run(mix, model, mode, max_num_seqs=MANY_ROWS if isinstance(model, FreeModel) else 16)
    began_s = time.process_time()
    with torch.inference_mode():
        run.serve([Arrival(0, each) for each in requests])
    assert not run.engine.counts.num_found_tokens, "they were to have nothing in common"
    return (time.process_time() - began_s) / sum(run.service.values())


def alternate(num_rounds: int) -> list[tuple[int, str]]:
    return [(index, mode) for index in range(num_rounds) for mode in (MODES if index % 2 else tuple(reversed(MODES)))]


def measure(mix: Mix, base: BaseModel) -> dict[str, Any]:
    shared: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    apart: dict[str, list[float]] = {mode: [] for mode in MODES}
    free: dict[str, list[float]] = {mode: [] for mode in MODES}
    for index, mode in alternate(mix.num_rounds):
        shared[mode].append(one_by_one(mix, base, mode, mix.shared(index)))
        apart[mode].append(together(mix, base, mode, mix.apart(index, mix.num_apart, 1000)))
        print(index, mode, shared[mode][-1], apart[mode][-1], flush=True)
    for index, mode in alternate(4 * mix.num_rounds):
        free[mode].append(together(mix, FreeModel(), mode, mix.apart(index, mix.num_free, 40)))
    return {"shared": speed_up(shared), "apart": overhead(apart), "apart_without_a_model": overhead(free)}


def speed_up(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of the requests after the first of a block, which alone computes what all begin with."""
    result: dict[str, Any] = {"found_tokens": found["on"][-1]["found"]}
    for name in ("first_s", "first_cpu_s"):
        ratios = [
            statistics.median(off[name][1:]) / statistics.median(on[name][1:])
            for on, off in zip(found["on"], found["off"], strict=True)
        ]
        result[f"{name}_off_of_on"] = round(statistics.median(ratios), 2)
        result[f"{name}_ratios"] = [round(each, 2) for each in ratios]
        for mode in MODES:
            values = [each for block in found[mode] for each in block[name][1:]]
            result[f"{name}_{mode}_median"] = round(statistics.median(values), 4)
        cold = [on[name][0] / off[name][0] for on, off in zip(found["on"], found["off"], strict=True)]
        result[f"{name}_of_the_first_on_of_off"] = round(statistics.median(cold), 3)
    ratios = [off["cpu_s"] / on["cpu_s"] for on, off in zip(found["on"], found["off"], strict=True)]
    result["block_cpu_s_off_of_on"] = round(statistics.median(ratios), 2)
    return result


def overhead(found: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    more_us = [1e6 * (on - off) for on, off in zip(found["on"], found["off"], strict=True)]
    return {
        "on_of_off": round(statistics.median(ratios), 4),
        "ratios": [round(each, 4) for each in ratios],
        "more_us_per_token": round(statistics.median(more_us), 2),
        "us_per_token": {mode: round(1e6 * statistics.median(values), 2) for mode, values in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Mix.num_rounds)
    parser.add_argument("--layers", type=int, default=Mix.num_layers)
    options = parser.parse_args()
    mix = Mix(num_rounds=options.rounds, num_layers=options.layers)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), "llama", num_hidden_layers=mix.num_layers, **SHAPE)
        base = BaseModel.load(ModelConfig(base=folder, device="cpu", num_threads=1))
        results = measure(mix, base)
    print(results)
    print(save("prefix_cache", str(__doc__), asdict(mix) | SHAPE, results))


if __name__ == "__main__":
    main()
