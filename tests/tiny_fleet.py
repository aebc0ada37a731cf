"""One real fleet on a tiny random base, with five adapters and their texts by PEFT; its fixtures are in conftest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tests.fleet_process import FleetProcess
from tests.tiny_models import LLAMA_TARGETS, load_peft, make_adapter

ADAPTERS = {
    "alpha": (("q_proj", "v_proj"), 4),
    "beta": (LLAMA_TARGETS, 8),
    "gamma": (("q_proj", "v_proj"), 16),
    "delta": (("gate_proj", "down_proj"), 3),
    "epsilon": (("k_proj", "o_proj", "up_proj"), 32),
}

NUM_GATEWAYS = 2


@dataclass(frozen=True)
class TinyFleet:
    fleet: FleetProcess
    base: Path
    adapters: dict[str, Path]

    def greedy_text(self, adapter: str | None, prompt: str, max_tokens: int) -> tuple[str, int]:
        """What PEFT's own greedy generation says, and how many tokens that took."""
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        model = load_peft(self.base, self.adapters[adapter or "alpha"])
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            if adapter is None:
                with model.disable_adapter():  # type: ignore[operator]
                    output = model.generate(input_ids=ids, max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator]
            else:
                output = model.generate(input_ids=ids, max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator]
        new = output[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True), len(new)


@contextmanager
def running_tiny_fleet(base: Path, adapters: dict[str, Path]) -> Iterator[TinyFleet]:
    with FleetProcess(str(base), fleet={"gateways": {"count": NUM_GATEWAYS}}) as fleet:
        for name, folder in adapters.items():
            fleet.cli("push", name, str(folder))
        yield TinyFleet(fleet, base, adapters)


def make_adapters(base: Path, folder: Path) -> dict[str, Path]:
    return {
        name: make_adapter(base, targets, rank, folder=folder / name, seed=seed)
        for seed, (name, (targets, rank)) in enumerate(ADAPTERS.items())
    }
