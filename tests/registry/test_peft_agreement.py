"""Our reading of a configuration against PEFT itself: which modules it targets, and with which rank and scale."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.adapter_format import read_adapter
from registry.config import RegistryConfig
from registry.target_rules import TargetRules, resolve_pattern
from registry.types import AdapterManifest, BaseSpec, ModuleKind, ModuleSpec
from tests.registry.uploads import sha, spec_of

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peft.tuners.tuners_utils import check_target_module_exists  # noqa: E402
from peft.utils.other import get_pattern_key  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

PATHS = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.experts.0.up_proj")
] + ["h.1.attn.c_attn", "c_attn"]

list_names = st.sampled_from(
    ["q_proj", "proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "up_proj", "c_attn", "layers.1", "x"]
)
regexes = st.sampled_from(
    [
        ".*q_proj",
        "q_proj",
        r".*layers\.(0|1)\..*(q_proj|up_proj)",
        ".*",
        r"model\.layers\.1{1,2}\..*",
        "",
        "(?i).*Q_PROJ",
    ]
)
name_sets = st.one_of(st.none(), st.lists(list_names, max_size=3), regexes)


@settings(max_examples=40, deadline=None)
@given(
    targets=st.one_of(st.lists(list_names, min_size=1, max_size=4), regexes),
    excludes=name_sets,
    layers=st.one_of(st.none(), st.lists(st.integers(0, 11), max_size=3)),
    patterns=st.sampled_from([None, [], "layers", "h", ["h", "layers"], "lay.rs", ["nothing"]]),
)
def test_targets_agree_with_peft(targets: Any, excludes: Any, layers: Any, patterns: Any) -> None:
    if isinstance(targets, str):
        layers = patterns = None
    config = SimpleNamespace(
        target_modules=targets,
        exclude_modules=excludes,
        modules_to_save=None,
        target_parameters=None,
        layers_to_transform=layers,
        layers_pattern=patterns,
    )
    theirs = {path for path in PATHS if check_target_module_exists(config, path)}
    rules = TargetRules(
        targets=targets if isinstance(targets, str) else frozenset(targets),
        excludes=excludes if isinstance(excludes, str) else frozenset(excludes or ()),
        layers=frozenset(layers) if layers else None,
        layers_patterns=(patterns,) if isinstance(patterns, str) else tuple(patterns or ()),
    )
    assert rules.targeted(PATHS, cpu_s=2) == theirs


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "q_proj",
                "layers.1.self_attn.q_proj",
                "^model.layers.0.self_attn.q_proj",
                "proj",
                ".*proj",
                "^q_proj",
                "a|b",
                "layers.1",
                r"layers\.\d+\.mlp\.up_proj",
                "c_attn",
                "^c_attn",
                "",
            ]
        ),
        st.integers(1, 64),
        max_size=4,
    )
)
def test_patterns_agree_with_peft(pattern: dict[str, int]) -> None:
    ours, _ = resolve_pattern(pattern, 8, PATHS, cpu_s=2)
    assert ours == {path: pattern.get(get_pattern_key(pattern.keys(), path), 8) for path in PATHS}


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4))


def _spec(model: Any) -> BaseSpec:
    modules = []
    for path, module in model.named_modules():
        if path.endswith("lm_head") or not isinstance(module, (torch.nn.Linear, Conv1D)):
            continue
        is_conv = isinstance(module, Conv1D)
        fan_in, out = module.weight.shape if is_conv else reversed(module.weight.shape)
        kind = ModuleKind.CONV1D if is_conv else ModuleKind.LINEAR
        modules.append(ModuleSpec(path=path, in_features=fan_in, out_features=out, kind=kind, sha256=sha(path)))
    return spec_of("tiny", modules)


def _save(model: Any, folder: Path, **fields: Any) -> tuple[Any, dict[str, Path]]:
    """Wrap with PEFT, fill lora_B with noise, save; returns the wrapped model and the file map."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        wrapped.save_pretrained(folder)
    return wrapped, {path.name: path for path in folder.iterdir()}


# PEFT writes the keys of a pattern in sorted order, so only patterns that mean the same when sorted survive a save.
SERVED: list[tuple[Any, dict[str, Any]]] = [
    (_llama, {"r": 4, "lora_alpha": 16}),
    (_llama, {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"}),
    (_llama, {"r": 4, "target_modules": r".*layers\.(0|1)\..*(q_proj|o_proj)"}),
    (_llama, {"r": 4, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    (
        _llama,
        {
            "r": 6,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 8, "q_proj": 3, "^model.layers.0.mlp.down_proj": 2},
            "alpha_pattern": {".*k_proj": 9, "layers.1.mlp.down_proj": 1},
        },
    ),
    (_llama, {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
    (_gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("build", "fields"), SERVED, ids=range(len(SERVED)))
def test_saved_adapter_is_read_as_peft_applies_it(tmp_path: Path, build: Any, fields: dict[str, Any]) -> None:
    model = build()
    base = _spec(model)
    wrapped, files = _save(model, tmp_path, **fields)
    manifest: AdapterManifest = read_adapter(files, base, RegistryConfig())
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert {module.path: module.rank for module in manifest.modules} == {path: r for path, (r, _) in theirs.items()}
    scales = {module.path: module.scale for module in manifest.modules}
    assert scales == pytest.approx({path: scale for path, (_, scale) in theirs.items()})


def test_saves_of_one_adapter_have_one_digest(tmp_path: Path) -> None:
    model = _llama()
    base = _spec(model)
    wrapped, files = _save(model, tmp_path / "one", target_modules=["q_proj", "v_proj", "up_proj"])
    wrapped.save_pretrained(tmp_path / "two")
    other = tmp_path / "two" / "adapter_config.json"
    config = json.loads(other.read_text())
    other.write_text(json.dumps({**config, "target_modules": config["target_modules"][::-1], "lora_dropout": 0.5}))
    digest = read_adapter(files, base, RegistryConfig()).digest
    again = {path.name: path for path in (tmp_path / "two").iterdir()}
    assert read_adapter(again, base, RegistryConfig()).digest == digest


REFUSED: list[tuple[dict[str, Any], set[str]]] = [
    ({"use_dora": True, "target_modules": ["q_proj"]}, {"dora"}),
    ({"lora_bias": True, "target_modules": ["q_proj"]}, {"lora_bias"}),
    ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, {"modules_to_save", "base_weight"}),
    ({"trainable_token_indices": [1, 2], "target_modules": ["q_proj"]}, {"trainable_tokens"}),
    ({"target_modules": ["embed_tokens", "q_proj"]}, {"embedding_lora", "base_weight"}),
    ({"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, {"init_changes_base"}),
    ({"init_lora_weights": "olora", "target_modules": ["q_proj"]}, {"init_changes_base"}),
]


@pytest.mark.parametrize(
    ("fields", "codes"), REFUSED, ids=lambda value: "+".join(value) if isinstance(value, dict) else ""
)
def test_variant_saved_by_peft_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], codes: set[str]) -> None:
    from registry.errors import InvalidAdapter

    model = _llama()
    base = _spec(model)
    _, files = _save(model, tmp_path, r=4, **fields)
    with pytest.raises(InvalidAdapter) as caught:
        read_adapter(files, base, RegistryConfig())
    assert {fault.code for fault in caught.value.faults} == codes
