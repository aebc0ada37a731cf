"""A base of random weights needs a config and a tokenizer, is the same for the same seed, and says so in its digest."""

from pathlib import Path

import pytest
import torch

from replica.errors import ModelError
from tests.replica.model.packed import PackedRunner, load_base, prompts
from tests.tiny_models import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without its weights."""
    made = make_model(tmp_path, "llama")
    (made / "model.safetensors").unlink()
    return made


def logits(folder: Path, **fields: object) -> torch.Tensor:
    runner = PackedRunner(load_base(folder, weights="random", **fields))
    text = prompts([9])[0]
    return runner.step([(runner.start(text), 9)])


def test_one_seed_gives_one_model(folder: Path) -> None:
    assert torch.equal(logits(folder, seed=3), logits(folder, seed=3))
    assert not torch.allclose(logits(folder, seed=3), logits(folder, seed=4))


def test_the_random_state_of_the_process_stays(folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_base(folder, weights="random")
    assert torch.equal(torch.rand(3), expected)


def test_digests_follow_config_and_seed(folder: Path) -> None:
    specs = [load_base(folder, weights="random", seed=seed).spec for seed in (1, 1, 2)]
    assert specs[0] == specs[1]
    assert specs[0].digest != specs[2].digest
    assert len({module.sha256 for module in specs[0].modules}) == len(specs[0].modules)


def test_files_are_asked_for_unless_weights_are_random(folder: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors"):
        load_base(folder)
