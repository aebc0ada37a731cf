"""`lorafleet plan`: what a workload needs, before there is a fleet. Asks no server."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.console.errors import Refused, WrongUsage
from cluster.console.render import Grid, human_bytes
from cluster.console.session import Session

if TYPE_CHECKING:  # numpy would slow down every other command
    from cluster.planning.sizing import Layout, Question
    from cluster.planning.workloads import Workload

GB, MB, KIB = 10**9, 10**6, 1024
SIMULATED_S, FEWEST, MOST = 120.0, 2000, 6000
"""Seconds of traffic that are simulated, and the bounds on their requests."""


def plan(
    session: Session,
    adapters: Annotated[int | None, typer.Option("--adapters", min=1, help="How many adapters are in use.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=0.001, help="Requests a second, all together.")] = None,
    exponent: Annotated[float, typer.Option("--zipf", min=0, help="How unequal they are; 0 is all alike.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A CSV of requests (at_s,adapter) in place of the three above.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Mean prompt.")] = 260,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Mean output.")] = 260,
    first_token: Annotated[
        float, typer.Option("--p99-first-token", min=0.001, help="Seconds in which 99 % of first tokens shall come.")
    ] = 0.5,
    tokens_per_s: Annotated[
        float, typer.Option("--tokens-per-s", min=0, help="Tokens a second that 95 % of streams shall get.")
    ] = 30.0,
    gpu_gb: Annotated[float, typer.Option("--gpu-gb", min=1, help="Memory of a GPU.")] = 80.0,
    base_gb: Annotated[float, typer.Option("--base-gb", min=0.01, help="Weights of the base.")] = 16.1,
    adapter_mb: Annotated[float, typer.Option("--adapter-mb", min=0.001, help="One adapter in a slot.")] = 83.9,
    kv_kib: Annotated[float, typer.Option("--kv-kib", min=0.1, help="KV cache of a token.")] = 128.0,
    rows: Annotated[int, typer.Option("--rows", min=1, max=4096, help="Requests that a replica runs at once.")] = 64,
    step_ms: Annotated[float, typer.Option("--step-ms", min=0.01, help="A decode step of the base alone.")] = 5.9,
    swap_ms: Annotated[float, typer.Option("--swap-ms", min=0, help="Host memory to slot.")] = 3.0,
    max_replicas: Annotated[int, typer.Option("--max-replicas", min=1, max=256, help="Look no further.")] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Of the simulated requests.")] = 0,
) -> None:
    """Simulate how many replicas, slots and GPUs a workload needs, beside deployments of its own for each tenant."""
    from cluster.planning.machine import Machine
    from cluster.planning.sizing import CannotPlan, Hardware, Objective, Question
    from cluster.planning.sizing import plan as make_plan

    workload = _workload(trace, adapters, rate, exponent, prompt_tokens, output_tokens, seed)
    question = Question(
        workload,
        Machine(num_rows=rows, step_s=step_ms / 1000, swap_s=swap_ms / 1000),
        Hardware(int(gpu_gb * GB), int(base_gb * GB), int(adapter_mb * MB), int(kv_kib * KIB)),
        Objective(first_token, tokens_per_s),
        max_replicas,
    )
    try:
        with session.output.waiting() as told:
            layouts = make_plan(question, told)
    except CannotPlan as error:
        raise Refused(str(error), code="cannot_plan") from None
    session.output.value(as_json(question, layouts))
    session.output.grid(grid(question, layouts))


def _workload(
    trace: Path | None,
    adapters: int | None,
    rate: float | None,
    exponent: float,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
) -> "Workload":
    from cluster.planning.traces import BadTrace, read_trace
    from cluster.planning.workloads import with_lengths, zipf

    if trace is not None:
        if adapters is not None or rate is not None:
            raise WrongUsage(
                "a trace says how many adapters there are and what they are asked for",
                hint="leave out --adapters and --rate",
            )
        try:
            return read_trace(trace, prompt_tokens, output_tokens)
        except BadTrace as error:
            raise WrongUsage(str(error)) from None
    if adapters is None or rate is None:
        raise WrongUsage("say what to plan for", hint="--adapters and --rate, or --trace")
    number = int(min(MOST, max(FEWEST, rate * SIMULATED_S)))
    drawn = zipf(number, rate, adapters, exponent, seed)
    return with_lengths(drawn, prompt_tokens, output_tokens, seed + 1)


def as_json(question: "Question", layouts: "list[Layout]") -> dict[str, Any]:
    workload = question.workload
    asked = {"adapters": workload.num_adapters, "requests_per_s": workload.num_requests / workload.duration_s}
    return {
        "workload": asked,
        "objective": asdict(question.objective),
        "layouts": [asdict(layout) for layout in layouts],
    }


def grid(question: "Question", layouts: "list[Layout]") -> Grid:
    workload = question.workload
    title = f"{workload.num_adapters} adapters, {workload.num_requests / workload.duration_s:.3g} requests/s"
    headers = ("LAYOUT", "DEPLOYMENTS", "GPUS", "SLOTS", "MEMORY A GPU", "SLOT HITS", "P99 FIRST TOKEN", "TOKENS/S")
    return Grid(headers, [_row(layout) for layout in layouts], title, frozenset(headers[1:]))


def _row(layout: "Layout") -> tuple[str, ...]:
    outcome = layout.outcome
    simulated = ("-", "-", "-")
    if outcome is not None:
        first_ms = 1000 * outcome.p99_first_token_s
        simulated = (f"{outcome.slot_hit_rate:.0%}", f"{first_ms:.0f} ms", f"{outcome.tokens_per_s_p5:.0f}")
    counts = (str(layout.num_deployments), str(layout.num_gpus), str(layout.num_slots))
    return (layout.name, *counts, human_bytes(layout.gpu_memory_bytes), *simulated)


COMMANDS: dict[str, Callable[..., None]] = {"plan": plan}
