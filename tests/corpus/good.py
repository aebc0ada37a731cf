"""Adapters that must be served, and give PEFT's logits."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.config import BdLoraConfig, VeloraConfig

from tests.corpus.kit import QV, Build, Case, Kit, edit_config, edit_tensors, rename, to_tar, to_zip
from tests.tiny_models import LLAMA_TARGETS, all_targets


def peft(**fields: Any) -> Build:
    return lambda kit, folder: kit.save(folder, **fields)


def then(change: Any, **fields: Any) -> Build:
    """Save a plain adapter, then `change(folder)`."""
    return lambda kit, folder: change(kit.save(folder, **fields))


def good(name: str, build: Build, *warnings: str, architecture: str = "llama") -> Case:
    return Case(name, build, warnings=frozenset(warnings), architecture=architecture)


def cases() -> Iterator[Case]:
    yield from targets()
    yield from ranks_and_scales()
    yield from initialisations()
    yield from configurations()
    yield from tensors()
    yield from files()
    yield from architectures()


def targets() -> Iterator[Case]:
    for name in LLAMA_TARGETS:
        yield good(f"only-{name}", peft(target_modules=[name]))
    yield good("k-and-v", peft(target_modules=["k_proj", "v_proj"]))
    yield good("gate-without-up", peft(target_modules=["gate_proj", "q_proj"]))
    yield good("all-seven", peft(target_modules=list(LLAMA_TARGETS)))
    yield good("all-linear", peft(target_modules="all-linear"))
    yield good("regex", peft(target_modules=r".*layers\.(0|1)\..*(q_proj|o_proj)"))
    yield good("dotted-names", peft(target_modules=["mlp.gate_proj", "self_attn.q_proj"]))
    yield good("full-paths", peft(target_modules=["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"]))
    yield good("excluded", peft(target_modules=["q_proj", "k_proj"], exclude_modules=["k_proj"]))
    yield good("excluded-by-regex", peft(target_modules=["q_proj"], exclude_modules=r".*layers\.0\..*"))
    yield good("one-layer", peft(layers_to_transform=1))
    yield good("layers-by-pattern", peft(layers_to_transform=[1], layers_pattern="layers"))
    yield good("some-names-absent", peft(target_modules=["q_proj", "absent_proj"]))
    yield good("all-linear-kept-as-text", then(lambda f: edit_config(f, target_modules="all-linear")))


def ranks_and_scales() -> Iterator[Case]:
    for rank in (1, 3, 8, 24):
        yield good(f"rank-{rank}", peft(r=rank, lora_alpha=16))
    yield good("rslora", peft(r=16, lora_alpha=16, use_rslora=True))
    mixed = {"r": 16, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 64}}
    yield good("mixed-ranks", peft(**mixed))
    yield good("mixed-ranks-rslora", peft(**mixed, use_rslora=True))
    yield good("first-pattern-wins", peft(r=16, rank_pattern={".*q_proj": 4, "layers.1.self_attn.q_proj": 8}))
    yield good("special-pattern-first", peft(r=16, rank_pattern={"layers.1.self_attn.q_proj": 8, "q_proj": 4}))
    anchored = {"^model.layers.1.self_attn.q_proj": 2}
    yield good("anchored-pattern", peft(rank_pattern=anchored))
    yield good("regex-pattern", peft(rank_pattern={r".*\.1\..*": 2}, alpha_pattern={".*_proj": 3}))
    yield good("idle-pattern", peft(rank_pattern={"nothing": 2}), "pattern_idle")
    for alpha in (8.5, -8, 1):
        yield good(f"alpha-{alpha}", peft(lora_alpha=alpha))
    yield good("alpha-zero", peft(lora_alpha=0), "alpha_zero")
    yield good("null-patterns", then(lambda f: edit_config(f, rank_pattern={}, alpha_pattern={})))


def initialisations() -> Iterator[Case]:
    for init in (True, False, "gaussian", "orthogonal", "eva", "mica"):
        yield good(f"init-{init}", peft(init_lora_weights=init))
    yield good("pissa-converted", lambda kit, folder: kit.save_converted(folder, "pissa"))
    yield good("pissa-converted-rslora", lambda kit, folder: kit.save_converted(folder, "pissa", use_rslora=True))
    yield good("olora-converted", lambda kit, folder: kit.save_converted(folder, "olora"))
    yield good("velora", peft(velora_config=VeloraConfig(num_groups=4)))
    blocks = {"target_modules_bd_a": ["o_proj", "down_proj"], "target_modules_bd_b": ["q_proj", "up_proj"]}
    names = [*blocks["target_modules_bd_a"], *blocks["target_modules_bd_b"]]
    yield good("bdlora", peft(target_modules=names, use_bdlora=BdLoraConfig(**blocks, nblocks=2)))
    loose = BdLoraConfig(target_modules_bd_a=["o_proj"], nblocks=4, match_strict=False)
    yield good("bdlora-on-some", peft(target_modules=["o_proj", "v_proj"], use_bdlora=loose))


def configurations() -> Iterator[Case]:
    yield good("dropout", peft(lora_dropout=0.5))
    yield good("no-task-type", peft(task_type=None))
    yield good("wrong-fan-in-flag", then(lambda f: edit_config(f, fan_in_fan_out=True)))
    yield good("branch-of-the-base", then(lambda f: edit_config(f, revision="main")))
    yield good("base-unnamed", then(lambda f: edit_config(f, base_model_name_or_path=None)))
    for name, value in {"hub-id": "acme/other", "pod-path": "/cache/x", "dots": "../.."}.items():
        yield good(
            f"base-named-{name}", then(lambda f, v=value: edit_config(f, base_model_name_or_path=v)), "base_name"
        )
    empty = {"new_flag": False, "new_list": [], "new_map": {}, "new_null": None}
    yield good("unknown-but-empty", then(lambda f: edit_config(f, **empty)))
    yield good("defaults-left-out", then(lambda f: edit_config(f, bias=..., use_dora=..., rank_pattern=...)))
    yield good(
        "megatron-fields", then(lambda f: edit_config(f, megatron_core="megatron.core", auto_mapping={"a": "b"}))
    )


def tensors() -> Iterator[Case]:
    for dtype in (torch.float16, torch.bfloat16):
        yield good(f"file-in-{str(dtype).removeprefix('torch.')}", peft(dtype=dtype))
    yield good("adapter-name-in-keys", then(lambda f: rename(f, lambda k: k.replace(".weight", ".default.weight"))))
    yield good("mixed-dtypes", then(lambda f: edit_tensors(f, halve_some)))
    zero = then(lambda f: edit_tensors(f, lambda t: [t[k].zero_() for k in t if "lora_B" in k]))
    yield good("changes-nothing", zero, "changes_nothing")
    big = then(lambda f: edit_tensors(f, lambda t: next(iter(t.values())).view(-1)[0].fill_(3.0e4)), lora_alpha=1)
    yield good("value-that-fp16-would-lose", big)


def halve_some(tensors: dict[str, torch.Tensor]) -> None:
    for key in sorted(tensors)[::2]:
        tensors[key] = tensors[key].half()


def write(folder: Path, **files: bytes) -> None:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def files() -> Iterator[Case]:
    yield good("named-export", peft(name="legal"))
    leftovers = {"optimizer_DOT_pt": b"\x80", "training_args_DOT_bin": b"\x80", "checkpoint-5__rng_DOT_pth": b"?"}
    yield good("trainers-leftovers", then(lambda f: write(f, **leftovers)))
    yield good("chat-template", then(lambda f: write(f, chat_template_DOT_jinja=b"{% for %}")), "chat_template_ignored")
    yield good("tokenizer-of-the-base", with_tokenizer)
    yield good("added-tokens-of-the-base", then(lambda f: write(f, added_tokens_DOT_json=b'{"<pad>": 258}')))
    yield good("zip", then(to_zip))
    yield good("zip-in-a-folder", then(lambda f: to_zip(f, "my-adapter/")))
    yield good("tar", then(lambda f: to_tar(f, "w")))
    yield good("tar-gz", then(to_tar))
    yield good("tar-of-a-dot", then(lambda f: to_tar(f, prefix="./")))
    yield good("tar-with-long-names", then(lambda f: to_tar(f, prefix="long" * 30 + "/")))


def with_tokenizer(kit: Kit, folder: Path) -> None:
    kit.save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(kit.folder / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"256": {"content": "<bos>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def architectures() -> Iterator[Case]:
    for architecture in ("qwen2", "gemma2", "phi3", "gpt2"):
        names = list(all_targets(architecture))
        yield good(f"{architecture}-all", peft(target_modules=names), architecture=architecture)
        yield good(f"{architecture}-first", peft(target_modules=names[:1], use_rslora=True), architecture=architecture)
    flag = then(lambda f: edit_config(f, fan_in_fan_out=False), target_modules=["c_attn"], fan_in_fan_out=True)
    yield good("gpt2-wrong-flag", flag, architecture="gpt2")
    yield good("gpt2-by-default", peft(target_modules=None, fan_in_fan_out=True), architecture="gpt2")
    yield good("qwen2-q-and-v", peft(target_modules=QV), architecture="qwen2")
