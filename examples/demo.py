"""A tour of a running server: `python -m examples.demo --url http://127.0.0.1:8000`.

Pushes every example adapter with the command line tool, chats with each through the `openai` package, then measures
held-out perplexity through the server. Exits with 1 when an adapter does not win on its own tenant's text, and with 2
when the server cannot be used.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from examples.corpus import ADAPTERS, Record, Sample, meets, read_records, tenants, to_sample
from examples.perplexity import BASE, answer_part, as_table, losing_rows, perplexity

MAX_TOKENS = 64
NUM_AT_ONCE = 8
"""Requests in flight while scoring: the server puts those of different adapters into one batch."""

console = Console(highlight=False)


class DemoError(Exception):
    """The tour cannot go on; the message is one line."""


def push(url: str, tenant: str) -> None:
    """Upload a tenant's adapter and make it live. Raises DemoError when the tool refuses."""
    command = (sys.executable, "-m", "cluster.cli", "push", tenant, str(ADAPTERS / tenant))
    console.rule(f"lorafleet push {tenant}", align="left")
    done = subprocess.run(command, env={**os.environ, "LORAFLEET_URL": url}, check=False)
    if done.returncode != 0:
        raise DemoError(f"pushing {tenant} ended with status {done.returncode}")


def base_name(models: Sequence[Any]) -> str:
    """The base among the listed models: the one that has no `parent`. Raises DemoError without one."""
    for model in models:
        if getattr(model, "parent", None) is None:
            return str(model.id)
    raise DemoError("the server lists no base model; name it with --base-model")


def stream_answer(client: OpenAI, model: str, messages: Any) -> Iterator[str]:
    """The pieces of an answer as they arrive."""
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def whole_answer(client: OpenAI, model: str, messages: Any) -> str:
    """An answer in one piece."""
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
    return reply.choices[0].message.content or ""


def show_streamed(client: OpenAI, model: str, record: Record) -> None:
    """Print an answer while it is written."""
    console.print(f"[bold]{model}[/], streamed: ", end="")
    pieces = []
    for piece in stream_answer(client, model, record["messages"]):
        pieces.append(piece)
        console.print(piece, end="", markup=False)
    console.print(verdict("".join(pieces), record))


def show_whole(client: OpenAI, model: str, record: Record) -> None:
    """Print an answer that came in one piece."""
    answer = whole_answer(client, model, record["messages"])
    console.print(f"[bold]{model}[/]: {escape(answer)}{verdict(answer, record)}")


def show_base(client: OpenAI, base: str, record: Record) -> None:
    """Print what the base says without any adapter; nothing is expected of it."""
    console.print(f"[dim]{base}, no adapter: {escape(whole_answer(client, base, record['messages']))}[/]")


def verdict(answer: str, record: Record) -> str:
    """Whether the answer is what the golden record asks for."""
    return "  [green](as expected)[/]" if meets(answer, record["expect"]) else "  [red](not as expected)[/]"


def chat(client: OpenAI, tenant: str, base: str) -> None:
    """Two golden prompts to the tenant's adapter, one streamed and one not; the first also to the base."""
    first, second = islice(read_records(tenant, "golden"), 2)
    console.rule(f"chat with {tenant}", align="left")
    show_prompt(first)
    show_base(client, base, first)
    show_streamed(client, tenant, first)
    show_prompt(second)
    show_whole(client, tenant, second)


def show_prompt(record: Record) -> None:
    console.print(f"[dim]> {escape(record['messages'][-1]['content'])}[/]")


def echo_logprobs(client: OpenAI, model: str, sample: Sample) -> list[float]:
    """What the model thinks of every token of a sample's answer; nothing is generated."""
    reply = client.completions.create(model=model, prompt=sample.text, max_tokens=0, echo=True, logprobs=0)
    logprobs = reply.choices[0].logprobs
    if logprobs is None or not logprobs.token_logprobs or not logprobs.text_offset:
        raise DemoError(f"{model} returned no log-probabilities")
    return answer_part(logprobs.token_logprobs, logprobs.text_offset, sample.num_answer_chars)


def measure(client: OpenAI, models: Mapping[str, str], num_heldout: int) -> dict[str, dict[str, float]]:
    """The table: tenant -> column -> perplexity. `models` maps a column to the model name to ask."""
    texts = {
        tenant: [to_sample(record) for record in read_records(tenant, "heldout")[:num_heldout]] for tenant in tenants()
    }
    jobs = [(tenant, column, sample) for tenant in texts for sample in texts[tenant] for column in models]
    logprobs: dict[tuple[str, str], list[float]] = {}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        results = pool.map(lambda job: echo_logprobs(client, models[job[1]], job[2]), jobs)
        for (tenant, column, _), values in zip(
            jobs, track(results, "scoring held-out text", total=len(jobs), console=console), strict=True
        ):
            logprobs.setdefault((tenant, column), []).extend(values)
    return {tenant: {column: perplexity(logprobs[tenant, column]) for column in models} for tenant in texts}


def tour(url: str, key: str, base: str | None, num_heldout: int) -> int:
    """Push, chat, measure; returns the exit status."""
    names = tenants()
    for tenant in names:
        push(url, tenant)
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        base = base or base_name(list(client.models.list()))
        for tenant in names:
            chat(client, tenant, base)
        matrix = measure(client, {**{name: name for name in names}, BASE: base}, num_heldout)
    console.print(as_table(matrix))
    if losers := losing_rows(matrix):
        console.print(f"[red]not best on their own text: {', '.join(losers)}[/]")
    return 1 if losers else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Push the example adapters, chat with them and measure them.")
    parser.add_argument("--url", default=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000"), help="the server")
    parser.add_argument("--key", default=os.environ.get("LORAFLEET_API_KEY", "none"), help="API key")
    parser.add_argument("--base-model", help="the base's model name; found in the server's list when left out")
    parser.add_argument("--num-heldout", type=int, default=6, help="held-out examples of each tenant")
    args = parser.parse_args(arguments)
    try:
        return tour(args.url.rstrip("/"), args.key, args.base_model, args.num_heldout)
    except (DemoError, OpenAIError, ValueError) as error:
        console.print(f"[red]demo: {escape(str(error))}[/]")
        return 2


if __name__ == "__main__":
    sys.exit(main())
