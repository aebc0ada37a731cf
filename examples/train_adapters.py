"""Trains the example adapters with PEFT: `python -m examples.train_adapters --base <folder, hub id or GGUF file>`.

A plain loop: AdamW, linear warm-up and cosine decay, loss on the assistant's tokens only, a fixed seed.
"""

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from examples.corpus import ADAPTERS, Sample, read_records, to_sample
from examples.local_model import load_base
from examples.recipes import RECIPES, Recipe
from examples.scoring import answer_losses, collate, encode

BASE_NAME = "SmolLM2-135M-Instruct"
NUM_WARMUP_STEPS = 6

log = logging.getLogger("train_adapters")


def lora_config(recipe: Recipe) -> LoraConfig:
    """PEFT's configuration of a recipe."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.use_rslora,
        rank_pattern=dict(recipe.rank_pattern),
        alpha_pattern=dict(recipe.alpha_pattern),
        layers_to_transform=None if recipe.layers is None else list(recipe.layers),
    )


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine down to 5 %."""
    if step < NUM_WARMUP_STEPS:
        return (step + 1) / NUM_WARMUP_STEPS
    progress = (step - NUM_WARMUP_STEPS) / max(1, num_steps - NUM_WARMUP_STEPS)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def batches(rng: random.Random, samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Endless batches; every sample comes once an epoch, in a new order, and an incomplete last batch is left out."""
    while True:
        order = rng.sample(samples, len(samples))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def fit(model: Any, tokenizer: Any, samples: Sequence[Sample], recipe: Recipe) -> None:
    """Run the recipe's steps on a causal LM whose only trainable parameters are its LoRA layers."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe.num_steps))
    stream = batches(random.Random(recipe.seed), samples, recipe.batch_size)
    for step in range(recipe.num_steps):
        started = time.perf_counter()
        batch = collate([encode(tokenizer, sample) for sample in next(stream)], tokenizer.pad_token_id)
        loss = answer_losses(model, batch).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == recipe.num_steps - 1:
            log.info("step %d loss %.3f (%.1f s)", step, loss.item(), time.perf_counter() - started)


def save(model: Any, folder: Path) -> None:
    """Write the two files of the adapter: bf16 tensors, and a configuration that is the same on every machine.

    PEFT would write its sets in any order, and the folder that the base was read from as its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in sorted(state.items())}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=sorted))
    config |= {"base_model_name_or_path": BASE_NAME, "inference_mode": True}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def train(base: Any, tokenizer: Any, tenant: str, out: Path) -> None:
    """Train and save one tenant's adapter; `base` is left as it was found."""
    recipe = RECIPES[tenant]
    samples = [to_sample(record) for record in read_records(tenant, "train")]
    torch.manual_seed(recipe.seed)
    model = get_peft_model(base, lora_config(recipe))
    log.info("%s: %d samples, %s", tenant, len(samples), recipe)
    try:
        fit(model.get_base_model(), tokenizer, samples, recipe)
        save(model, out / tenant)
    finally:
        model.unload()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example adapters.")
    parser.add_argument("--base", required=True, help="the base model: a folder, a hub id or a GGUF file")
    parser.add_argument("--tenants", nargs="*", choices=sorted(RECIPES), default=list(RECIPES), metavar="TENANT")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="folder to write the adapters to")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    base, tokenizer = load_base(args.base)
    for tenant in args.tenants:
        train(base, tokenizer, tenant, args.out)


if __name__ == "__main__":
    main()
