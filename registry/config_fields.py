"""What each key of `adapter_config.json` means to a server that batches many adapters over one shared base.

A key absent from these tables is unknown: PEFT drops such keys with a warning, although they may change the
mathematics, so here they are refused unless their value switches nothing on.
"""

import re

from registry.faults import FaultList, shown

_PLAIN_ONLY = "merge the adapter into a full model, or train and export plain LoRA"
_NEEDS_OWN_WEIGHTS = "it needs full weights of its own, which cannot share a base with other adapters; " + _PLAIN_ONLY

READ = frozenset(
    {
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "bias",
        "revision",
        "use_bdlora",
    }
)
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "peft_version",
        "inference_mode",
        "lora_dropout",
        "fan_in_fan_out",
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "velora_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)

REFUSED: dict[str, tuple[str, str, str]] = {
    "use_dora": ("dora", "DoRA needs per-row magnitudes", _PLAIN_ONLY),
    "lora_bias": ("lora_bias", "biases on lora_B are not served", _PLAIN_ONLY),
    "modules_to_save": ("modules_to_save", "whole modules are replaced", _NEEDS_OWN_WEIGHTS),
    "trainable_token_indices": ("trainable_tokens", "rows of the embedding are replaced", _NEEDS_OWN_WEIGHTS),
    "target_parameters": ("target_parameters", "LoRA on expert parameters is not served", _PLAIN_ONLY),
    "layer_replication": ("layer_replication", "the adapter is for a stack of repeated layers", _PLAIN_ONLY),
    "use_qalora": ("qalora", "QA-LoRA pools its input by groups", _PLAIN_ONLY),
    "kasa_config": ("kasa", "KaSA truncates the base weights", _PLAIN_ONLY),
    "alora_invocation_tokens": ("alora", "aLoRA acts only after its invocation tokens", _PLAIN_ONLY),
    "arrow_config": ("arrow", "Arrow routes between several adapters", _PLAIN_ONLY),
    "monteclora_config": ("monteclora", "MonteCLoRA carries a sampler", _PLAIN_ONLY),
}
"""Key -> stable code, why it cannot be served, and what to do."""

CHANGES_SHAPES = frozenset({"qalora", "target_parameters", "layer_replication"})
"""Codes after which a complaint about shapes or modules would only mislead."""

_PLAIN_INITS = ("gaussian", "eva", "mica", "orthogonal")
_BASE_CHANGING_INIT = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga|loftq")


def check_kind(raw: dict[str, object], faults: FaultList) -> None:
    """Fault what makes the file something other than plain LoRA for a causal language model."""
    peft_type, task_type = raw.get("peft_type"), raw.get("task_type")
    if peft_type != "LORA":
        faults.add("peft_type", f"peft_type is {shown(peft_type)}; only 'LORA' is served", field="peft_type")
    if task_type not in (None, "CAUSAL_LM"):
        message = f"task_type is {shown(task_type)}; only 'CAUSAL_LM' (or null) is served"
        faults.add("task_type", message, field="task_type")
    if raw.get("bias", "none") not in (None, "none"):
        message = f"bias is {shown(raw['bias'])}: the base's biases are replaced; only 'none' is served"
        faults.add("bias", message, hint=_NEEDS_OWN_WEIGHTS, field="bias")
    _check_init(raw.get("init_lora_weights", True), faults)
    for key, value in raw.items():
        _check_key(key, value, faults)


def _check_key(key: str, value: object, faults: FaultList) -> None:
    if not value or key in READ or key in WITHOUT_EFFECT:
        return
    if key in REFUSED:
        code, why, hint = REFUSED[key]
        faults.add(code, f"{key} is {shown(value)}: {why}", hint=hint, field=key)
        return
    faults.add(
        "unknown_field",
        f"{shown(key)} is {shown(value)}: this server does not know what it changes",
        hint="if it has no effect at inference, remove it or set it to null",
        field=key[:200],
    )


def _check_init(value: object, faults: FaultList) -> None:
    if value is None or isinstance(value, bool) or value in _PLAIN_INITS:
        return
    field = "init_lora_weights"
    if isinstance(value, str) and _BASE_CHANGING_INIT.fullmatch(value):
        faults.add(
            "init_changes_base",
            f"{field} is {shown(value)}: training changed the base, so the adapter is wrong on the original one",
            hint="save it again with path_initial_model_for_weight_conversion, which makes it plain LoRA",
            field=field,
        )
        return
    faults.add("init", f"{field} is {shown(value)}, which this server does not know", field=field)
