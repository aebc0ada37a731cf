"""One real fleet on a tiny random base for the whole folder, with five adapters pushed and their texts by PEFT."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.fleet_process import FleetProcess
from tests.tiny_models import LLAMA_TARGETS, load_peft, make_adapter, make_model

ADAPTERS = {
    "alpha": (("q_proj", "v_proj"), 4),
    "beta": (LLAMA_TARGETS, 8),
    "gamma": (("q_proj", "v_proj"), 16),
    "delta": (("gate_proj", "down_proj"), 3),
    "epsilon": (("k_proj", "o_proj", "up_proj"), 32),
}


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


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_adapters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(tiny_base, targets, rank, folder=root / name, seed=seed)
        for seed, (name, (targets, rank)) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="session")
def tiny_fleet(tiny_base: Path, tiny_adapters: dict[str, Path]) -> Iterator[TinyFleet]:
    with FleetProcess(str(tiny_base)) as fleet:
        for name, folder in tiny_adapters.items():
            fleet.cli("push", name, str(folder))
        yield TinyFleet(fleet, tiny_base, tiny_adapters)
