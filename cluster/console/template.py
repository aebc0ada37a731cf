"""`lorafleet template`: a training script whose adapter fits the fleet, made from what the fleet says of itself."""

import json

from cluster.console.errors import Refused
from cluster.console.session import Session
from registry.types import BaseBinding, FleetTemplate

DEFAULT_RANK = 16
TORCH_DTYPES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}


def show_template(session: Session) -> None:
    """Print the script, or with --json the template and the LoraConfig's fields. Raises Refused without a base."""
    template = session.client.template()
    if template.base is None:
        raise Refused("no base model has been published yet", code="not_ready", hint="wait for a replica")
    session.output.value({**template.model_dump(mode="json"), "lora_config": lora_fields(template)})
    for line in script_lines(template, template.base):
        session.output.line(line)


def lora_fields(template: FleetTemplate) -> dict[str, object]:
    """Arguments of PEFT's LoraConfig."""
    rank = min(template.rules.ranks, default=min(DEFAULT_RANK, template.max_rank))
    return {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(template.targets),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def script_lines(template: FleetTemplate, base: BaseBinding) -> list[str]:
    """A whole script but for the training itself."""
    claim = base.model_dump(mode="json", include={"base_id", "revision", "digest", "tokenizer_sha256"})
    revision = f", revision={base.revision!r}" if base.revision else ""
    return [
        "import json",
        "from pathlib import Path",
        "",
        *(["import torch"] if _cast_lines(template) else []),
        "from peft import LoraConfig, get_peft_model",
        "from transformers import AutoModelForCausalLM",
        "",
        f"BASE = {json.dumps(base.base_id)}  # folder or hub id",
        'FOLDER = Path("adapter")',
        "",
        "config = LoraConfig(",
        *(f"    {name}={_python(value)}," for name, value in lora_fields(template).items()),
        ")",
        f"model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE{revision}), config)",
        "",
        "# train `model` here",
        "",
        *_cast_lines(template),
        "model.save_pretrained(FOLDER)",
        f"base = {_python(claim)}",
        '(FOLDER / "lorafleet_base.json").write_text(json.dumps(base))',
        "",
        "# then: lorafleet push NAME adapter",
    ]


def _cast_lines(template: FleetTemplate) -> list[str]:
    """PEFT trains and saves in float32; nothing to do when the fleet takes that."""
    dtypes = template.rules.dtypes
    if not dtypes or "F32" in dtypes:
        return []
    return [f"model.to({TORCH_DTYPES[dtypes[0]]})  # what this fleet asks adapters to be saved in"]


def _python(value: object) -> str:
    return json.dumps(value) if value is not None and not isinstance(value, dict) else repr(value)
