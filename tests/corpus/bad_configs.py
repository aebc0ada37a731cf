"""Adapters that must be refused for what their configuration says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft.tuners.lora.config import KasaConfig

from tests.corpus.good import peft, then
from tests.corpus.kit import CONFIG, Build, Case, edit_config


def bad(name: str, code: str, build: Build, *also: str) -> Case:
    return Case(name, build, code=code, also=frozenset(also))


def edited(name: str, code: str, **fields: Any) -> Case:
    return bad(name, code, then(lambda f: edit_config(f, **fields)))


def cases() -> Iterator[Case]:
    yield from variants()
    yield from kinds()
    yield from types()
    yield from texts()
    yield from targets()
    yield from bases()


def variants() -> Iterator[Case]:
    """What PEFT can train and a shared base cannot serve; saved by PEFT where it can be made without data."""
    yield bad("dora", "dora", peft(use_dora=True))
    yield edited("dora-without-magnitudes", "dora", use_dora=True)
    yield bad("lora-bias", "lora_bias", peft(lora_bias=True))
    yield bad("bias-all", "bias", peft(bias="all"))
    yield edited("bias-lora-only", "bias", bias="lora_only")
    whole = ["embed_tokens", "lm_head"]
    yield bad("modules-to-save", "modules_to_save", peft(modules_to_save=["lm_head"]), "base_weight")
    yield bad("modules-to-save-both", "modules_to_save", peft(modules_to_save=whole), "base_weight")
    yield edited("modules-to-save-absent", "modules_to_save", modules_to_save=["lm_head"])
    tokens = peft(trainable_token_indices=[1, 2])
    yield bad("trainable-tokens", "trainable_tokens", tokens)
    for name in whole:
        yield bad(f"target-{name}", "embedding_lora", peft(target_modules=[*whole, "q_proj"]), "base_weight")
    yield bad("layer-replication", "layer_replication", peft(layer_replication=[[0, 2], [1, 2]]))
    yield edited("target-parameters", "target_parameters", target_parameters=["mlp.experts.gate_up_proj"])
    yield edited("qalora", "qalora", use_qalora=True)
    yield bad("kasa", "kasa", peft(kasa_config=KasaConfig()))
    yield edited("alora", "alora", alora_invocation_tokens=[5, 6])
    yield edited("arrow", "arrow", arrow_config={"top_k": 3})
    yield edited("monteclora", "monteclora", monteclora_config={"n": 4})
    yield edited("bdlora-without-names", "bdlora", use_bdlora={"nblocks": 2})
    both = {"nblocks": 2, "target_modules_bd_a": ["q_"], "target_modules_bd_b": ["q_proj"], "match_strict": False}
    yield edited("bdlora-both-sides", "bdlora", use_bdlora=both)
    odd = {"nblocks": 3, "target_modules_bd_a": ["q_proj"], "match_strict": False}
    yield edited("bdlora-indivisible", "bdlora", use_bdlora=odd)
    for init in ("pissa", "pissa_niter_4", "olora"):
        yield bad(init, "init_changes_base", peft(init_lora_weights=init))
    for init in ("corda", "lora_ga", "loftq"):
        yield edited(init, "init_changes_base", init_lora_weights=init)
    yield edited("init-unknown", "init", init_lora_weights="surprise")
    yield edited("unknown-flag", "unknown_field", brand_new_thing=True)
    yield edited("unknown-object", "unknown_field", brand_new_thing={"a": 1})


def kinds() -> Iterator[Case]:
    for kind in ("IA3", "ADALORA", "PROMPT_TUNING", "lora"):
        yield edited(f"peft-type-{kind}", "peft_type", peft_type=kind)
    yield edited("peft-type-missing", "peft_type", peft_type=...)
    for task in ("SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"):
        yield edited(f"task-{task}", "task_type", task_type=task)


def types() -> Iterator[Case]:
    for value in (0, -1, 4.0, "4", True, None):
        yield edited(f"r-{value!r}", "field_type", r=value)
    yield edited("alpha-text", "field_type", lora_alpha="16")
    yield edited("rank-pattern-list", "field_type", rank_pattern=[1])
    yield edited("rank-pattern-zero", "field_type", rank_pattern={"q_proj": 0})
    yield edited("alpha-pattern-text", "field_type", alpha_pattern={"q_proj": "x"})
    yield edited("rslora-text", "field_type", use_rslora="yes")
    yield edited("targets-numbers", "field_type", target_modules=[1])


def replaced(old: bytes, new: bytes) -> Build:
    def change(folder: Path) -> None:
        path = folder / CONFIG
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return then(change)


def texts() -> Iterator[Case]:
    for text in ("NaN", "Infinity", "1e999"):
        yield bad(f"alpha-{text}", "config_json", replaced(b'"lora_alpha": 8', b'"lora_alpha": ' + text.encode()))
    yield bad("key-twice", "config_json", replaced(b'"r": 4', b'"r": 4, "r": 8'))
    yield bad("cut-json", "config_json", then(lambda f: (f / CONFIG).write_bytes(b'{"r": 4')))
    yield bad("list-json", "config_json", then(lambda f: (f / CONFIG).write_bytes(b"[]")))
    yield bad("empty-json", "config_json", then(lambda f: (f / CONFIG).write_bytes(b"")))


def targets() -> Iterator[Case]:
    yield edited("untargeted-pair", "untargeted_module", target_modules=["q_proj"])
    yield edited("excluded-pair", "untargeted_module", exclude_modules=["v_proj"])
    yield edited("untargeted-layer", "untargeted_module", layers_to_transform=[0])
    yield edited("regex-broken", "pattern", target_modules="(q_proj")
    yield edited("regex-for-ever", "pattern", target_modules="(([a-z_.0-9])+)+!")
    yield edited("rank-pattern-broken", "pattern", rank_pattern={"(": 4})
    yield edited("layers-with-regex", "layers_with_pattern", target_modules=".*", layers_to_transform=[0])


def bases() -> Iterator[Case]:
    claim = '{"base_id": "tiny-llama", "digest": "' + "0" * 64 + '"}'
    yield bad("other-weights", "base_mismatch", then(lambda f: (f / "lorafleet_base.json").write_text(claim)))
    tokenizer = '{"tokenizer_sha256": "' + "1" * 64 + '"}'
    yield bad(
        "other-tokenizer", "tokenizer_mismatch", then(lambda f: (f / "lorafleet_base.json").write_text(tokenizer))
    )
    yield bad("claim-broken", "base_claim", then(lambda f: (f / "lorafleet_base.json").write_text('{"wat": 1}')))
    yield edited("other-revision", "base_revision", revision="b" * 40)
