"""What is promised of the committed adapters: small, bf16, ranks as the recipes say, no machine's paths."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from examples.corpus import ADAPTERS, tenants
from examples.recipes import RECIPES
from registry.types import is_adapter_name

MAX_TOTAL_BYTES = 15_000_000
FILES = {"adapter_config.json", "adapter_model.safetensors"}


def config_of(tenant: str) -> dict[str, Any]:
    return dict(json.loads((ADAPTERS / tenant / "adapter_config.json").read_text(encoding="utf-8")))


def tensors_of(tenant: str) -> dict[str, dict[str, Any]]:
    """The safetensors header, without its metadata."""
    data = (ADAPTERS / tenant / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return {key: value for key, value in header.items() if key != "__metadata__"}


def test_every_tenant_has_an_adapter_and_a_recipe() -> None:
    folders = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    assert folders == tenants() == sorted(RECIPES)
    assert all(is_adapter_name(name) for name in folders)


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in ADAPTERS.rglob("*") if path.is_file()) <= MAX_TOTAL_BYTES


def test_ranks_of_the_adapters_differ() -> None:
    assert {recipe.rank for recipe in RECIPES.values()} == {4, 8, 16, 32}
    assert sum(recipe.use_rslora for recipe in RECIPES.values()) == 1


@pytest.mark.parametrize("tenant", sorted(RECIPES))
def test_folder_holds_the_two_files_and_nothing_else(tenant: str) -> None:
    assert {path.name for path in (ADAPTERS / tenant).iterdir()} == FILES


@pytest.mark.parametrize("tenant", sorted(RECIPES))
def test_config_follows_the_recipe(tenant: str) -> None:
    config, recipe = config_of(tenant), RECIPES[tenant]
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", recipe.rank, recipe.alpha)
    assert config["target_modules"] == sorted(recipe.targets)
    assert config["use_rslora"] is recipe.use_rslora
    assert config["rank_pattern"] == recipe.rank_pattern
    assert config["alpha_pattern"] == recipe.alpha_pattern


@pytest.mark.parametrize("tenant", sorted(RECIPES))
def test_config_names_the_base_and_no_path(tenant: str) -> None:
    config = config_of(tenant)
    assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
    assert "/" not in json.dumps(config)


@pytest.mark.parametrize("tenant", sorted(RECIPES))
def test_tensors_are_bf16_pairs_of_the_recipes_rank(tenant: str) -> None:
    recipe, tensors = RECIPES[tenant], tensors_of(tenant)
    layers = recipe.layers or range(30)
    assert len(tensors) == 2 * len(layers) * len(recipe.targets)
    for key, tensor in tensors.items():
        path, _, side = key.removesuffix(".weight").rpartition(".")
        projection = Path(path).suffix.removeprefix(".")
        rank = recipe.rank_pattern.get(projection, recipe.rank)
        assert tensor["dtype"] == "BF16"
        assert tensor["shape"][0 if side == "lora_A" else 1] == rank


@pytest.mark.parametrize("tenant", sorted(RECIPES))
def test_training_left_no_pair_at_its_zero_start(tenant: str) -> None:
    """An untrained B is all zeros, which would make the pair do nothing."""
    data = (ADAPTERS / tenant / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for key, tensor in tensors_of(tenant).items():
        if "lora_B" in key:
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            assert any(data[start:end]), key
