"""Every kind of upload that must be refused, by the code and the words of its fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from registry.adapter_format import read_adapter
from registry.config import RegistryConfig
from registry.errors import InvalidAdapter, LimitExceeded
from registry.types import Fault
from tests.registry.uploads import (
    PREFIX,
    Tensors,
    bf16,
    f16,
    f32,
    framed,
    make_base,
    make_config,
    make_tensors,
    paths_of,
    safetensors_bytes,
    write_upload,
)

BASE = make_base()
PATHS = paths_of(BASE, "q_proj", "v_proj")
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def sound() -> Tensors:
    return make_tensors(BASE, PATHS)


def faults_of(
    folder: Path, config: Any, weights: Any, limits: RegistryConfig | None = None, **more: bytes
) -> tuple[Fault, ...]:
    files = write_upload(folder, config, weights, **more)
    with pytest.raises(InvalidAdapter) as caught:
        read_adapter(files, BASE, limits or RegistryConfig())
    return caught.value.faults


def codes(faults: tuple[Fault, ...]) -> set[str]:
    return {fault.code for fault in faults}


CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"use_dora": True}, "dora", "use_dora"),
    ({"lora_bias": True}, "lora_bias", "lora_bias"),
    ({"bias": "all"}, "bias", "'all'"),
    ({"bias": "lora_only"}, "bias", "'lora_only'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save", "lm_head"),
    ({"trainable_token_indices": [1, 2]}, "trainable_tokens", "trainable_token_indices"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters", "gate_up_proj"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication", "layer_replication"),
    ({"use_qalora": True}, "qalora", "use_qalora"),
    ({"use_bdlora": {"nblocks": 2}}, "bdlora", "use_bdlora"),
    ({"kasa_config": {"beta": 1}}, "kasa", "kasa_config"),
    ({"alora_invocation_tokens": [5]}, "alora", "alora_invocation_tokens"),
    ({"arrow_config": {"top_k": 3}}, "arrow", "arrow_config"),
    ({"monteclora_config": {"n": 4}}, "monteclora", "monteclora_config"),
    ({"brand_new_thing": True}, "unknown_field", "brand_new_thing"),
    ({"init_lora_weights": "pissa"}, "init_changes_base", "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_changes_base", "pissa_niter_16"),
    ({"init_lora_weights": "olora"}, "init_changes_base", "olora"),
    ({"init_lora_weights": "corda"}, "init_changes_base", "corda"),
    ({"init_lora_weights": "lora_ga"}, "init_changes_base", "lora_ga"),
    ({"init_lora_weights": "loftq"}, "init_changes_base", "loftq"),
    ({"init_lora_weights": "surprise"}, "init", "surprise"),
    ({"init_lora_weights": 1}, "init", "init_lora_weights"),
    ({"peft_type": "IA3"}, "peft_type", "IA3"),
    ({"peft_type": "lora"}, "peft_type", "'lora'"),
    ({"peft_type": None}, "peft_type", "None"),
    ({"task_type": "SEQ_CLS"}, "task_type", "SEQ_CLS"),
    ({"r": 0}, "field_type", "r is 0"),
    ({"r": -1}, "field_type", "r is -1"),
    ({"r": 4.0}, "field_type", "r is 4.0"),
    ({"r": "4"}, "field_type", "r is '4'"),
    ({"r": True}, "field_type", "r is True"),
    ({"r": None}, "field_type", "r is None"),
    ({"lora_alpha": "16"}, "field_type", "lora_alpha is '16'"),
    ({"lora_alpha": None}, "field_type", "lora_alpha"),
    ({"use_rslora": "yes"}, "field_type", "use_rslora"),
    ({"rank_pattern": {"q_proj": 0}}, "field_type", "rank_pattern['q_proj'] is 0"),
    ({"rank_pattern": [1]}, "field_type", "rank_pattern"),
    ({"alpha_pattern": {"q_proj": "x"}}, "field_type", "alpha_pattern['q_proj']"),
    ({"target_modules": 7}, "field_type", "target_modules"),
    ({"target_modules": ["q_proj", 3]}, "field_type", "target_modules"),
    ({"layers_to_transform": ["0"]}, "field_type", "layers_to_transform"),
    ({"base_model_name_or_path": 3}, "field_type", "base_model_name_or_path"),
    ({"layers_to_transform": [0], "target_modules": ".*(q_proj|v_proj)"}, "layers_with_pattern", "list"),
    ({"target_modules": ["q_proj"]}, "untargeted_module", "v_proj"),
    ({"target_modules": ["proj"]}, "untargeted_module", "q_proj"),
    ({"target_modules": []}, "untargeted_module", "q_proj"),
    ({"exclude_modules": ["v_proj"]}, "untargeted_module", "v_proj"),
    ({"layers_to_transform": [1]}, "untargeted_module", "layers.0"),
    ({"target_modules": "model.layers.0.*"}, "untargeted_module", "layers.1"),
    ({"target_modules": "("}, "pattern", "not a valid regular expression"),
    ({"target_modules": "(a|" * 400 + ")" * 400}, "pattern", "longer than"),
    ({"rank_pattern": {"(": 2}}, "pattern", "rank_pattern"),
    ({"alpha_pattern": {"[": 2}}, "pattern", "alpha_pattern"),
    ({"rank_pattern": {"q_proj": 4}}, "shape", "(4, 8)"),
    ({"r": 3}, "shape", "expected (3, 8)"),
]


@pytest.mark.parametrize(("fields", "code", "words"), CONFIGS)
def test_upload_is_refused_for_its_configuration(tmp_path: Path, fields: dict[str, Any], code: str, words: str) -> None:
    faults = faults_of(tmp_path, make_config(**fields), sound())
    assert codes(faults) == {code}
    assert words in " ".join(f"{fault.message} {fault.hint}" for fault in faults)


@pytest.mark.parametrize("value", [None, False, [], {}, "", 0])
def test_unknown_field_is_accepted_when_it_switches_nothing_on(tmp_path: Path, value: object) -> None:
    files = write_upload(tmp_path, make_config(brand_new_thing=value), sound())
    assert len(read_adapter(files, BASE, RegistryConfig()).modules) == 4


RAW_CONFIGS = [
    (b"", "config_json"),
    (b"[]", "config_json"),
    (b"{", "config_json"),
    (b'{"r": 2, "r": 4}', "config_json"),
    (b'{"lora_alpha": NaN}', "config_json"),
    (b'{"lora_alpha": -Infinity}', "config_json"),
    (b'{"lora_alpha": 1e999}', "config_json"),
    (b'{"r": 99999999999999999999999999}', "config_json"),
    (b'{"r": "\\ud800"}', "config_json"),
    (b"\xff\xfe", "config_json"),
    (b"[" * 200_000, "config_json"),
]


@pytest.mark.parametrize(("raw", "code"), RAW_CONFIGS, ids=range(len(RAW_CONFIGS)))
def test_configuration_that_is_not_strict_json_is_refused(tmp_path: Path, raw: bytes, code: str) -> None:
    assert codes(faults_of(tmp_path, raw, sound())) == {code}


Change = Callable[[Tensors], None]


def _set(key: str, tensor: Any) -> Change:
    return lambda tensors: tensors.update({key: tensor})


def _drop(key: str) -> Change:
    return lambda tensors: tensors.pop(key) and None


def _rename(change: Callable[[str], str]) -> Change:
    def apply(tensors: Tensors) -> None:
        renamed = {change(key): tensor for key, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return apply


def _poke(value: float, encode: Callable[[Any], Any] = f32) -> Change:
    values = np.ones((8, 2), dtype="<f4")
    values[3, 1] = value
    return _set(f"{Q0}.lora_B.weight", encode(values))


ONES = f32(np.ones((2, 8)))
TENSORS: list[tuple[Change, str, str]] = [
    (_drop(f"{Q0}.lora_A.weight"), "missing_tensor", f"{Q0}.lora_A.weight"),
    (_drop(f"{Q0}.lora_B.weight"), "missing_tensor", f"{Q0}.lora_B.weight"),
    (_set(f"{Q0}.lora_magnitude_vector", f32([1] * 8)), "dora", "magnitude"),
    (_set(f"{Q0}.lora_B.bias", f32([1] * 8)), "lora_bias", "lora_B.bias"),
    (_set(f"{Q0}.base_layer.bias", f32([1] * 8)), "bias", "base_layer.bias"),
    (_set(f"{Q0}.base_layer.weight", ONES), "base_weight", "base_layer.weight"),
    (_set(f"{PREFIX}model.norm.weight", f32([1] * 8)), "base_weight", "model.norm.weight"),
    (_set(f"{PREFIX}lm_head.weight", ONES), "base_weight", "lm_head.weight"),
    (_set("model.norm.weight", ONES), "base_weight", "model.norm.weight"),
    (_set(f"{PREFIX}model.embed_tokens.lora_embedding_A", ONES), "embedding_lora", "lora_embedding_A"),
    (_set(f"{PREFIX}lm_head.lora_A.weight", ONES), "embedding_lora", "lm_head"),
    (_set(f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", ONES), "trainable_tokens", "trainable"),
    (_set(f"{Q0}.lora_diag", f32([1, 1])), "kasa", "lora_diag"),
    (_set(f"{PREFIX}model.layers.0.mlp.experts.0.w1.lora_A.weight", ONES), "expert_lora", "experts"),
    (_set(f"{PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight", ONES), "expert_lora", "experts"),
    (_set(f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight", ONES), "unknown_module", "another base"),
    (_set(f"{PREFIX}model.layers.0.attn.wq.lora_A.weight", ONES), "unknown_module", "attn.wq"),
    (_set("junk", ONES), "unexpected_tensor", "junk"),
    (_set(f"{Q0}.lora_A.other.weight", ONES), "unexpected_tensor", "lora_A.other"),
    (_set(f"{Q0}.lora_A.default.weight", ONES), "duplicate_tensor", "lora_A.default.weight"),
    (_set(f"{Q0}.lora_A.weight", f32(np.ones((8, 2)))), "base_mismatch", "(8, 2)"),
    (_set(f"{Q0}.lora_A.weight", f32(np.ones((2, 16)))), "base_mismatch", "another base"),
    (_set(f"{Q0}.lora_B.weight", f32(np.ones((16, 2)))), "base_mismatch", "expected (8, 2)"),
    (_set(f"{Q0}.lora_A.weight", f32(np.ones((3, 8)))), "shape", "(3, 8)"),
    (_set(f"{Q0}.lora_A.weight", f32(np.ones((16,)))), "shape", "(16,)"),
    (_set(f"{Q0}.lora_A.weight", f32(np.ones((0, 8)))), "shape", "(0, 8)"),
    (_set(f"{Q0}.lora_A.weight", ("I8", (2, 8), bytes(16))), "dtype", "'I8'"),
    (_set(f"{Q0}.lora_A.weight", ("F64", (2, 8), bytes(128))), "dtype", "'F64'"),
    (_set(f"{Q0}.lora_A.weight", ("F8_E4M3", (2, 8), bytes(16))), "dtype", "F8_E4M3"),
    (_poke(np.nan), "not_finite", "1 values"),
    (_poke(-np.inf), "not_finite", f"{Q0}.lora_B.weight"),
    (_poke(np.nan, f16), "not_finite", "1 values"),
    (_poke(np.inf, bf16), "not_finite", "1 values"),
    (_poke(3.4e38), "overflow", "bfloat16"),
    (_rename(lambda key: key.removeprefix(PREFIX)), "prefix", f"begins with ''; expected '{PREFIX}'"),
    (_rename(lambda key: key.replace(".layers", ".language_model.layers")), "prefix", "language_model."),
    (_rename(lambda key: key.replace("model.model.", "model.language_model.model.")), "prefix", "language_model."),
    (_rename(lambda key: key.replace("model.model.", "model._orig_mod.model.")), "compiled_prefix", "_orig_mod"),
    (lambda tensors: tensors.clear(), "nothing_bound", "no LoRA pair"),
]


@pytest.mark.parametrize(("change", "code", "words"), TENSORS, ids=[f"{i}-{t[1]}" for i, t in enumerate(TENSORS)])
def test_upload_is_refused_for_its_tensors(tmp_path: Path, change: Change, code: str, words: str) -> None:
    tensors = sound()
    change(tensors)
    faults = faults_of(tmp_path, make_config(), tensors)
    assert code in codes(faults)
    assert codes(faults) <= {code, "nothing_bound", "missing_tensor"}
    assert words in " ".join(f"{fault.message} {fault.hint}" for fault in faults)


@pytest.mark.parametrize("value", [65504.0 * 2, 3.38e38, -1e-45, 0.0, -0.0])
def test_fp32_values_that_bf16_can_hold_are_accepted(tmp_path: Path, value: float) -> None:
    tensors = sound()
    _poke(value)(tensors)
    assert read_adapter(write_upload(tmp_path, make_config(), tensors), BASE, RegistryConfig()).modules


def test_overflow_limit_agrees_with_rounding_to_bf16(tmp_path: Path) -> None:
    from registry.tensor_facts import BF16_OVERFLOW_BITS

    torch = pytest.importorskip("torch")
    bits = np.array([BF16_OVERFLOW_BITS - 1, BF16_OVERFLOW_BITS], dtype="<u4")
    cast = torch.from_numpy(bits.view("<f4").copy()).to(torch.bfloat16)
    assert cast.isfinite().tolist() == [True, False]


def _header(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64], **changes}
    return framed(json.dumps({f"{Q0}.lora_A.weight": entry}).encode(), bytes(64))


WHOLE = safetensors_bytes(sound())
FILES: list[tuple[bytes, str, str]] = [
    (b"", "truncated", "0 bytes"),
    (b"\0\0\0", "truncated", "3 bytes"),
    (WHOLE[: len(WHOLE) // 2], "truncated", "truncated"),
    (WHOLE[:40], "truncated", "header"),
    (WHOLE[:-1], "truncated", "truncated"),
    (WHOLE + b"x", "header", "belong to nothing"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "lfs_pointer", "git lfs pull"),
    (b"PK\x03\x04" + bytes(200), "header", "not a safetensors file"),
    (b"\xff" * 64, "header", "not a safetensors file"),
    (framed(b"[]", b""), "header", "not a JSON object"),
    (framed(b"{nope", b""), "header", "JSON"),
    (framed(b'{"a": 1}', b""), "header", "dtype, shape and data_offsets"),
    (framed(b'{"__metadata__": {"a": 1}}', b""), "header", "__metadata__"),
    (_header(dtype=3), "header", "bad dtype"),
    (_header(shape=[-2, 8]), "header", "bad dtype"),
    (_header(shape=[2.0, 8]), "header", "bad dtype"),
    (_header(shape=[True, 16]), "header", "bad dtype"),
    (_header(shape=[2, 9]), "header", "takes 72 bytes"),
    (_header(data_offsets=[64, 0]), "header", "offsets"),
    (_header(data_offsets=[0]), "header", "data_offsets"),
    (_header(data_offsets=[8, 72]), "header", "gap"),
    (_header(extra=1), "header", "dtype, shape and data_offsets"),
]


@pytest.mark.parametrize(("weights", "code", "words"), FILES, ids=range(len(FILES)))
def test_file_that_is_not_sound_safetensors_is_refused(tmp_path: Path, weights: bytes, code: str, words: str) -> None:
    faults = faults_of(tmp_path, make_config(), weights)
    assert codes(faults) == {code}
    assert words in f"{faults[0].message} {faults[0].hint}"


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}
    header = json.dumps({"a": entry, "b": {**entry, "data_offsets": [32, 96]}}).encode()
    (fault,) = faults_of(tmp_path, make_config(), framed(header, bytes(96)))
    assert "overlaps" in fault.message


def test_duplicate_key_in_the_header_is_refused(tmp_path: Path) -> None:
    entry = b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    (fault,) = faults_of(tmp_path, make_config(), framed(b'{"a": %b, "a": %b}' % (entry, entry), bytes(4)))
    assert fault.code == "header"
    assert "twice" in fault.message


def test_pattern_that_backtracks_for_ever_is_refused_in_time(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, make_config(target_modules="(([a-z_.0-9])+)+!"), sound())
    assert fault.code == "pattern"
    assert "takes over 1 s" in fault.message


def test_every_fault_of_an_upload_is_reported_at_once(tmp_path: Path) -> None:
    tensors = sound()
    tensors.pop(f"{Q0}.lora_B.weight")
    tensors["junk"] = ONES
    _set(f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.weight", f32(np.full((2, 8), np.nan)))(tensors)
    faults = faults_of(tmp_path, make_config(use_dora=True, r=3, odd=1), tensors, **{"adapter_model.bin": b"x"})
    wanted = {"dora", "unknown_field", "pickle", "missing_tensor", "unexpected_tensor", "not_finite", "shape"}
    assert wanted <= codes(faults)


def test_many_faults_of_one_kind_are_counted_not_listed(tmp_path: Path) -> None:
    tensors = {f"junk.{i}": ONES for i in range(100)}
    faults = faults_of(tmp_path, make_config(), tensors)
    assert len([fault for fault in faults if fault.code == "unexpected_tensor"]) == 9
    assert any("and 92 more" in fault.message for fault in faults)


def test_shape_change_of_a_variant_does_not_mislead(tmp_path: Path) -> None:
    tensors = sound()
    _set(f"{Q0}.lora_A.weight", f32(np.ones((2, 4))))(tensors)
    assert codes(faults_of(tmp_path, make_config(use_bdlora={"nblocks": 2}), tensors)) == {"bdlora"}


def test_rank_over_the_limit_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors(BASE, PATHS, rank=9)
    faults = faults_of(tmp_path, make_config(r=9), tensors, RegistryConfig(max_rank=8))
    assert codes(faults) == {"rank_too_large"}
    assert "at most 8" in faults[0].message


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("adapter_model.bin", "pickle"),
        ("adapter_model.safetensors.index.json", "sharded"),
        ("adapter_model-00001-of-00002.safetensors", "sharded"),
        ("Adapter_Config.json", "ambiguous_files"),
    ],
)
def test_other_forms_of_the_weights_are_refused(tmp_path: Path, name: str, code: str) -> None:
    assert codes(faults_of(tmp_path, make_config(), sound(), **{name: b"{}"})) == {code}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "a\\b", "a\0b", "", ".", "a//b"])
def test_file_name_that_is_no_plain_path_is_refused(tmp_path: Path, name: str) -> None:
    files = write_upload(tmp_path, make_config(), sound())
    with pytest.raises(InvalidAdapter, match="plain relative path"):
        read_adapter({**files, name: files["adapter_config.json"]}, BASE, RegistryConfig())


def test_link_is_refused(tmp_path: Path) -> None:
    files = write_upload(tmp_path, make_config(), sound())
    link = tmp_path / "link"
    link.symlink_to(files["adapter_config.json"])
    with pytest.raises(InvalidAdapter, match="not a regular file"):
        read_adapter({**files, "README.md": link}, BASE, RegistryConfig())


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    files = write_upload(tmp_path, make_config(), sound())
    files.pop(name)
    with pytest.raises(InvalidAdapter, match=f"{name} is missing"):
        read_adapter(files, BASE, RegistryConfig())


def test_several_adapters_in_one_upload_are_refused(tmp_path: Path) -> None:
    one = write_upload(tmp_path / "one", make_config(), sound())
    two = write_upload(tmp_path / "two", make_config(), sound())
    files = {**{f"one/{k}": v for k, v in one.items()}, **{f"two/{k}": v for k, v in two.items()}}
    with pytest.raises(InvalidAdapter, match="several adapters"):
        read_adapter(files, BASE, RegistryConfig())


@pytest.mark.parametrize(
    "limits",
    [{"max_adapter_bytes": 100}, {"max_config_bytes": 10}, {"max_files": 1}],
    ids=lambda limit: next(iter(limit)),
)
def test_upload_over_a_limit_is_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    files = write_upload(tmp_path, make_config(), sound())
    with pytest.raises(LimitExceeded, match=str(next(iter(limits.values())))):
        read_adapter(files, BASE, RegistryConfig.model_validate(limits))


@pytest.mark.parametrize("tokens", [b'{"<x>": 100}', b'{"<x>": -1}', b'{"<x>": "1"}', b"[]", b"{", b'{"<x>": true}'])
def test_added_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, tokens: bytes) -> None:
    assert codes(faults_of(tmp_path, make_config(), sound(), **{"added_tokens.json": tokens})) == {"added_tokens"}
