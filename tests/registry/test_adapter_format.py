"""Uploads that are served: what is read from them, and what identifies them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from registry.adapter_format import read_adapter
from registry.config import RegistryConfig
from registry.types import AdapterManifest
from tests.registry.uploads import (
    PREFIX,
    bf16,
    f16,
    f32,
    make_base,
    make_config,
    make_conv_base,
    make_tensors,
    paths_of,
    safetensors_bytes,
    write_upload,
)

BASE = make_base()
PATHS = paths_of(BASE, "q_proj", "v_proj")
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
LIMITS = RegistryConfig()


def read(folder: Path, config: Any, tensors: Any = None, **more: bytes) -> AdapterManifest:
    weights = make_tensors(BASE, PATHS) if tensors is None else tensors
    return read_adapter(write_upload(folder, config, weights, **more), BASE, LIMITS)


def warned(manifest: AdapterManifest) -> set[str]:
    return {warning.code for warning in manifest.warnings}


def test_plain_adapter_is_described(tmp_path: Path) -> None:
    manifest = read(tmp_path, make_config())
    assert [module.path for module in manifest.modules] == sorted(PATHS)
    assert {(module.rank, module.alpha, module.scale) for module in manifest.modules} == {(2, 4.0, 2.0)}
    first = manifest.modules[0]
    assert (first.a.key, first.a.dtype, first.a.shape) == (f"{PREFIX}{Q0}.lora_A.weight", "F32", (2, 8))
    assert manifest.blob_bytes == (tmp_path / "adapter_model.safetensors").stat().st_size
    assert (manifest.max_rank, manifest.target_names) == (2, ("q_proj", "v_proj"))
    assert manifest.base_digest == BASE.digest
    assert manifest.base_verified
    assert warned(manifest) == set()


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 8.5}, 4.25),
        ({"lora_alpha": -8}, -4.0),
        ({"use_rslora": True}, 4 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 6, "v_proj": 6}}, 3.0),
        ({"alpha_pattern": {".*_proj": 6}, "use_rslora": True}, 6 / math.sqrt(2)),
    ],
)
def test_scale_follows_alpha_and_rank(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    manifest = read(tmp_path, make_config(**fields))
    assert [module.scale for module in manifest.modules] == [scale] * 4


def test_first_pattern_that_matches_wins(tmp_path: Path) -> None:
    tensors = make_tensors(BASE, paths_of(BASE, "q_proj"), rank=4)
    pattern = {"q_proj": 4, "layers.1.self_attn.q_proj": 8}
    manifest = read(
        tmp_path, make_config(r=16, lora_alpha=16, rank_pattern=pattern, target_modules=["q_proj"]), tensors
    )
    assert [(module.rank, module.scale) for module in manifest.modules] == [(4, 4.0), (4, 4.0)]
    assert warned(manifest) == set()


def test_pattern_keys_match_at_dots_and_anchor(tmp_path: Path) -> None:
    deep = make_base(num_layers=12)
    ranks = {path: 4 if ".1." in path else 2 for path in paths_of(deep, "q_proj")}
    tensors = make_tensors(deep, paths_of(deep, "q_proj"), rank=ranks)
    config = make_config(rank_pattern={"layers.1.self_attn.q_proj": 4, "^layers.2.self_attn.q_proj": 64})
    manifest = read_adapter(write_upload(tmp_path, config, tensors), deep, LIMITS)
    assert [module.rank for module in manifest.modules if module.path == Q1] == [4]
    assert {module.rank for module in manifest.modules if ".11." in module.path or ".2." in module.path} == {2}
    assert warned(manifest) == {"pattern_idle"}


def test_mixed_ranks_do_not_depend_on_the_order_of_tensors(tmp_path: Path) -> None:
    ranks = {path: 4 if path.endswith("q_proj") else 2 for path in PATHS}
    tensors = make_tensors(BASE, PATHS, rank=ranks)
    config = make_config(rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 64})
    there = read(tmp_path / "there", config, tensors)
    back = read(tmp_path / "back", config, dict(reversed(tensors.items())))
    assert there.digest == back.digest
    assert there.modules == back.modules
    assert there.blob_sha256 != back.blob_sha256
    assert {module.path: module.scale for module in there.modules} == {
        path: 1.0 if path.endswith("q_proj") else 32.0 for path in PATHS
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["v_proj", "q_proj"]},
        {"target_modules": PATHS},
        {"target_modules": ["self_attn.q_proj", "self_attn.v_proj"]},
        {"target_modules": ["q_proj", "v_proj", "absent_proj"]},
        {"target_modules": r".*layers\.(0|1)\..*(q_proj|v_proj)"},
        {"target_modules": "all-linear"},
        {"target_modules": "ALL-Linear", "exclude_modules": ["mlp.gate_proj"]},
        {"target_modules": None},
        {"exclude_modules": r".*\.mlp\..*"},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": [1, 0], "layers_pattern": ["h", "layers"]},
        {"layers_to_transform": []},
        {"layers_to_transform": [7], "target_modules": PATHS},
        {"fan_in_fan_out": True},
        {"rank_pattern": None, "alpha_pattern": None},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": False},
        {"velora_config": {"rank": 1}, "ensure_weight_tying": True, "auto_mapping": {"a": "b"}},
        {"task_type": None, "base_model_name_or_path": None, "revision": "main", "peft_version": "0.21.2"},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_settings_that_change_nothing_leave_the_digest_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = read(tmp_path / "plain", make_config())
    assert read(tmp_path / "other", make_config(**fields)).digest == plain.digest


def test_one_layer_may_be_targeted_by_number(tmp_path: Path) -> None:
    deep = make_base(num_layers=12)
    path = "model.layers.11.self_attn.q_proj"
    files = write_upload(tmp_path, make_config(layers_to_transform=11), make_tensors(deep, [path]))
    assert [module.path for module in read_adapter(files, deep, LIMITS).modules] == [path]


@pytest.mark.parametrize("flag", [True, False])
def test_conv1d_base_takes_factors_in_linear_orientation(tmp_path: Path, flag: bool) -> None:
    base = make_conv_base()
    tensors = make_tensors(base, [base.modules[0].path])
    config = make_config(target_modules=["c_attn"], fan_in_fan_out=flag)
    (module,) = read_adapter(write_upload(tmp_path, config, tensors), base, LIMITS).modules
    assert (module.a.shape, module.b.shape) == ((2, 8), (24, 2))


def test_digest_does_not_depend_on_the_bytes_of_the_configuration(tmp_path: Path) -> None:
    config = make_config()
    shuffled = json.dumps(dict(reversed(config.items())), indent=2).encode()
    assert read(tmp_path / "a", config).digest == read(tmp_path / "b", shuffled).digest


def test_digest_does_not_depend_on_metadata_or_neighbours(tmp_path: Path) -> None:
    tensors = make_tensors(BASE, PATHS)
    tagged = safetensors_bytes(tensors, metadata={"format": "pt", "run": "7"})
    other = read(tmp_path / "b", make_config(), tagged, **{"README.md": b"hello", "optimizer.pt": b"?"})
    assert other.digest == read(tmp_path / "a", make_config(), tensors).digest


def test_digest_changes_with_what_changes_the_answer(tmp_path: Path) -> None:
    plain = make_tensors(BASE, PATHS)
    half = {key: f16(np.frombuffer(data, "<f4").reshape(shape)) for key, (_, shape, data) in plain.items()}
    swapped = dict(plain)
    a0, a1 = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q1}.lora_A.weight"
    swapped[a0], swapped[a1] = plain[a1], plain[a0]
    digests = {
        read(tmp_path / "plain", make_config(), plain).digest,
        read(tmp_path / "alpha", make_config(lora_alpha=5), plain).digest,
        read(tmp_path / "scale", make_config(use_rslora=True), plain).digest,
        read(tmp_path / "half", make_config(), half).digest,
        read(tmp_path / "seed", make_config(), make_tensors(BASE, PATHS, seed=1)).digest,
        read(tmp_path / "swapped", make_config(), swapped).digest,
        read_adapter(write_upload(tmp_path / "base", make_config(), plain), make_base(weights="x"), LIMITS).digest,
    }
    assert len(digests) == 7


@pytest.mark.parametrize("encode", [f32, f16, bf16])
def test_supported_dtypes_are_kept_as_uploaded(tmp_path: Path, encode: Any) -> None:
    tensors = {key: encode(np.ones(shape)) for key, (_, shape, _) in make_tensors(BASE, PATHS).items()}
    manifest = read(tmp_path, make_config(), tensors)
    assert {module.a.dtype for module in manifest.modules} == {encode([0])[0]}


def test_large_tensor_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(tmp_path / "a", make_config())
    monkeypatch.setattr("registry.tensor_facts.CHUNK_BYTES", 12)
    assert read(tmp_path / "b", make_config()).modules == whole.modules


def test_adapter_name_inside_the_keys_is_tolerated(tmp_path: Path) -> None:
    tensors = make_tensors(BASE, PATHS)
    named = {key.replace(".weight", ".default.weight"): tensor for key, tensor in tensors.items()}
    assert read(tmp_path / "a", make_config(), named).digest == read(tmp_path / "b", make_config(), tensors).digest


def test_export_in_a_sub_folder_is_accepted(tmp_path: Path) -> None:
    files = write_upload(tmp_path, make_config(), make_tensors(BASE, PATHS))
    (tmp_path / "README.md").write_text("model card")
    nested = {f"my-adapter/{name}": path for name, path in files.items()}
    manifest = read_adapter({**nested, "README.md": tmp_path / "README.md"}, BASE, LIMITS)
    assert manifest == read_adapter(files, BASE, LIMITS)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"lora_alpha": 0}, "alpha_zero"),
        ({"rank_pattern": {"nothing_here": 5}}, "pattern_idle"),
        ({"alpha_pattern": {"nothing_here": 5}}, "pattern_idle"),
        ({"base_model_name_or_path": "other/model"}, "base_name"),
        ({"base_model_name_or_path": "../../etc"}, "base_name"),
        ({"target_modules": None}, "targets_null"),
    ],
)
def test_legal_but_suspicious_upload_is_accepted_with_a_warning(tmp_path: Path, fields: Any, code: str) -> None:
    assert warned(read(tmp_path, make_config(**fields))) == {code}


@pytest.mark.parametrize("name", ["/pod/cache/Tiny", "tiny/", "acme/tiny", "TINY"])
def test_base_is_recognised_by_the_end_of_its_name(tmp_path: Path, name: str) -> None:
    manifest = read(tmp_path, make_config(base_model_name_or_path=name))
    assert manifest.base_verified
    assert not manifest.warnings


def test_adapter_whose_b_is_zero_is_accepted_with_a_warning(tmp_path: Path) -> None:
    tensors = make_tensors(BASE, PATHS)
    for key, (dtype, shape, data) in tensors.items():
        if ".lora_B." in key:
            tensors[key] = (dtype, shape, bytes(len(data)))
    assert warned(read(tmp_path, make_config(), tensors)) == {"changes_nothing"}


def test_added_tokens_that_the_base_has_are_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, make_config(), **{"added_tokens.json": b'{"<pad>": 99}'}).modules


def test_chat_template_is_ignored_with_a_notice(tmp_path: Path) -> None:
    assert warned(read(tmp_path, make_config(), **{"chat_template.jinja": b"{% for %}"})) == {"chat_template_ignored"}
