"""How many replicas, slots and GPUs a workload needs, by simulation, beside what other ways to serve it would need."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.planning.machine import Machine
from cluster.planning.policies import Affinity
from cluster.planning.simulator import Outcome, simulate
from cluster.planning.workloads import Workload
from router.config import PlacementConfig

UTILISATION = 0.75
"""How full a GPU may be in the estimates that are not simulated."""

SLOT_STEPS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MERGED_ROWS = 4
"""Rows whose KV cache a merged model keeps even when hardly anybody calls it."""


class CannotPlan(ValueError):
    """No fleet of the allowed size meets the objective; the message says what stands in the way."""


@dataclass(frozen=True)
class Objective:
    """What clients shall see: 99 of 100 first tokens, and 95 of 100 streams, are at least this fast."""

    p99_first_token_s: float
    tokens_per_s: float

    def is_met(self, outcome: Outcome) -> bool:
        return outcome.p99_first_token_s <= self.p99_first_token_s and outcome.tokens_per_s_p5 >= self.tokens_per_s


@dataclass(frozen=True)
class Hardware:
    """One GPU, and what base, adapters and KV cache take of it, in bytes."""

    gpu_bytes: int
    base_bytes: int
    adapter_bytes: int
    kv_token_bytes: int
    reserve_bytes: int = 2 << 30
    """Activations, CUDA graphs and the context."""
    usable_share: float = 0.9

    def fixed_bytes(self, kv_tokens: int) -> int:
        """Everything but the adapters' slots."""
        return self.base_bytes + self.reserve_bytes + kv_tokens * self.kv_token_bytes

    def most_slots(self, kv_tokens: int) -> int:
        """Slots that fit beside the rest; 0 or less when not even the rest fits."""
        return int(self.gpu_bytes * self.usable_share - self.fixed_bytes(kv_tokens)) // self.adapter_bytes


@dataclass(frozen=True)
class Layout:
    """One way to serve the workload. What was not simulated is None."""

    name: str
    num_deployments: int
    num_gpus: int
    num_slots: int
    gpu_memory_bytes: int
    """In use on a GPU."""
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Question:
    """All that a plan follows from."""

    workload: Workload
    machine: Machine
    hardware: Hardware
    objective: Objective
    max_replicas: int = 64
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache that let every row run: rows of the 95th percentile of lengths."""
        lengths = self.workload.prompt_tokens + self.workload.output_tokens
        return math.ceil(self.machine.num_rows * float(np.percentile(lengths, 95)))


Told = Callable[[str], None]


def plan(question: Question, told: Told = lambda text: None) -> list[Layout]:
    """The smallest shared fleet, one deployment a tenant, and merged models. Raises CannotPlan."""
    return [shared(question, told), per_tenant(question), merged(question)]


def shared(question: Question, told: Told = lambda text: None) -> Layout:
    """The fewest replicas with as many slots as fit, then the fewest slots that do as well. Raises CannotPlan."""
    most = min(question.hardware.most_slots(question.kv_tokens), question.workload.num_adapters)
    if most < 1:
        raise CannotPlan(_too_small(question))
    tried: dict[tuple[int, int], Outcome] = {}

    def meets(num_replicas: int, num_slots: int) -> bool:
        told(f"simulating {num_replicas} replicas with {num_slots} slots")
        outcome = tried[num_replicas, num_slots] = _simulate(question, num_replicas, num_slots)
        return question.objective.is_met(outcome)

    num_replicas = _fewest(question, lambda number: meets(number, most), lambda number: tried[number, most])
    steps = [number for number in SLOT_STEPS if number < most]
    num_slots = next((number for number in steps if meets(num_replicas, number)), most)
    memory = question.hardware.fixed_bytes(question.kv_tokens) + num_slots * question.hardware.adapter_bytes
    return Layout("shared base", num_replicas, num_replicas, num_slots, memory, tried[num_replicas, num_slots])


def per_tenant(question: Question) -> Layout:
    """A base with one adapter for each tenant, on GPUs of its own; the busiest tenant is simulated on its GPUs."""
    rates = _rates(question.workload)
    capacity = UTILISATION * _requests_per_s(question, 1)
    counts = np.maximum(1, np.ceil(rates / capacity)).astype(int)
    busiest = int(np.argmax(rates))
    outcome = _simulate(replace(question, workload=_only(question.workload, busiest)), int(counts[busiest]), 1)
    memory = question.hardware.fixed_bytes(question.kv_tokens) + question.hardware.adapter_bytes
    return Layout("one deployment a tenant", len(rates), int(counts.sum()), 1, memory, outcome)


def merged(question: Question) -> Layout:
    """Every adapter merged into a base of its own, as many on a GPU as its memory holds and its time allows.

    Two models on a GPU take turns, since their requests share no batch: each needs the GPU for as much of the time as
    it has anything to do (Poisson arrivals), and for more when it alone has more than a batch. A lower bound.
    """
    hardware, rates = question.hardware, _rates(question.workload)
    in_flight = rates / _requests_per_s(question, 0) * question.machine.num_rows
    row_tokens = question.kv_tokens / question.machine.num_rows
    rows = np.clip(np.ceil(2 * in_flight), MERGED_ROWS, question.machine.num_rows)
    model_bytes = hardware.base_bytes + rows * row_tokens * hardware.kv_token_bytes
    usable = hardware.gpu_bytes * hardware.usable_share - hardware.reserve_bytes
    busy = np.maximum(1 - np.exp(-in_flight), in_flight / question.machine.num_rows)
    by_memory, by_time = float(model_bytes.sum()) / usable, float(busy.sum()) / UTILISATION
    num_gpus = math.ceil(max(by_memory, by_time))
    used = int(model_bytes.sum() / num_gpus) + hardware.reserve_bytes
    return Layout("merged", len(rates), num_gpus, 0, used)


def _fewest(question: Question, meets: Callable[[int], bool], outcome: Callable[[int], Outcome]) -> int:
    """The fewest replicas that meet the objective: doubling, then bisection. More replicas never do worse."""
    low, high = 0, 1
    while not meets(high):
        if high >= question.max_replicas:
            raise CannotPlan(_too_slow(question, outcome(high)))
        low, high = high, min(2 * high, question.max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _simulate(question: Question, num_replicas: int, num_slots: int) -> Outcome:
    machine = replace(question.machine, num_slots=num_slots)
    policy = Affinity(num_replicas, question.workload.names(), question.placement)
    return simulate(machine, num_replicas, policy, question.workload)


def _rates(workload: Workload) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Requests a second of every adapter."""
    counts = np.bincount(workload.adapters, minlength=workload.num_adapters)
    return counts / max(workload.duration_s, 1e-9)


def _requests_per_s(question: Question, num_adapters: int) -> float:
    workload = question.workload
    prompt, output = float(workload.prompt_tokens.mean()), float(workload.output_tokens.mean())
    return question.machine.requests_per_s(prompt, output, num_adapters)


def _only(workload: Workload, adapter: int) -> Workload:
    chosen = workload.adapters == adapter
    columns: Sequence[str] = ("at_s", "adapters", "prompt_tokens", "output_tokens")
    return replace(workload, **{column: getattr(workload, column)[chosen] for column in columns})


def _too_small(question: Question) -> str:
    hardware = question.hardware
    needed = hardware.fixed_bytes(question.kv_tokens) + hardware.adapter_bytes
    usable = hardware.gpu_bytes * hardware.usable_share
    return (
        f"base, KV cache of {question.machine.num_rows} rows and one adapter take {needed / 1e9:.1f} GB; "
        f"{usable / 1e9:.1f} GB of a GPU are usable"
    )


def _too_slow(question: Question, outcome: Outcome) -> str:
    return (
        f"{question.max_replicas} replicas give a p99 first token of {outcome.p99_first_token_s:.3f} s and "
        f"{outcome.tokens_per_s_p5:.0f} tokens/s; asked for are {question.objective.p99_first_token_s:g} s and "
        f"{question.objective.tokens_per_s:g} tokens/s"
    )
