"""Judges the example adapters with PEFT alone, no server: `python -m examples.check_adapters --base <base>`.

Prints every adapter's greedy answers to its golden prompts, and the table of held-out perplexity. Exits with 1 when an
adapter does not win on its own tenant's text.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.markup import escape

from examples.corpus import ADAPTERS, END_OF_TURN, meets, read_records, render, tenants, to_sample
from examples.local_model import load_base
from examples.perplexity import BASE, as_table, losing_rows, perplexity
from examples.scoring import answer_logprobs

MAX_NEW_TOKENS = 64

console = Console()


@contextmanager
def reader(base: Any, column: str, adapters: Path) -> Iterator[Any]:
    """The base with a column's adapter inside, or as it is; afterwards the base is clean again."""
    if column == BASE:
        yield base
        return
    model = PeftModel.from_pretrained(base, str(adapters / column))
    try:
        yield model.get_base_model()
    finally:
        model.unload()


@torch.inference_mode()
def greedy_answer(model: Any, tokenizer: Any, context: str) -> str:
    """The most likely continuation, up to the end of the turn or MAX_NEW_TOKENS."""
    inputs = tokenizer(context, return_tensors="pt", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=end, pad_token_id=end
    )
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def show_golden(model: Any, tokenizer: Any, column: str, tenant: str, num_golden: int) -> None:
    """Print a reader's answers to a tenant's golden prompts and whether each meets its expectation."""
    for record in read_records(tenant, "golden")[:num_golden]:
        answer = greedy_answer(model, tokenizer, render(record["messages"]))
        mark = "[green]meets[/]" if meets(answer, record["expect"]) else "[red]misses[/]"
        console.print(f"{column} {mark} {escape(record['messages'][-1]['content'])}\n    -> {escape(answer)}")


def score(model: Any, tokenizer: Any, num_heldout: int) -> dict[str, float]:
    """One column of the table: tenant -> perplexity of its held-out answers."""
    texts = {tenant: read_records(tenant, "heldout")[:num_heldout] for tenant in tenants()}
    return {
        tenant: perplexity(answer_logprobs(model, tokenizer, [to_sample(record) for record in records]))
        for tenant, records in texts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Judge the example adapters with PEFT.")
    parser.add_argument("--base", required=True, help="the base model: a folder, a hub id or a GGUF file")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder with one adapter a tenant")
    parser.add_argument("--num-heldout", type=int, default=16, help="held-out examples of each tenant")
    parser.add_argument("--num-golden", type=int, default=6, help="golden prompts of each tenant")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base, tokenizer = load_base(args.base)
    columns: dict[str, dict[str, float]] = {}
    for column in (*tenants(), BASE):
        with reader(base, column, args.adapters) as model:
            if column != BASE:
                show_golden(model, tokenizer, column, column, args.num_golden)
            columns[column] = score(model, tokenizer, args.num_heldout)
    matrix = {tenant: {column: scores[tenant] for column, scores in columns.items()} for tenant in tenants()}
    console.print(as_table(matrix))
    return 1 if losing_rows(matrix) else 0


if __name__ == "__main__":
    sys.exit(main())
