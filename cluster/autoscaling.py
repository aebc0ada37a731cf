"""How many replicas the fleet should have: by the work that waits, and by adapters that push one another out of slots.

The decision is a pure function of what replicas report; `SwapAwarePolicy` at the end shows it to Ray Serve, which adds
its delays and bounds (Ray 2.60, `autoscaling_config.policy`). Serve pickles this module by value: keep it
self-contained, with globals that pickle.

Queues say that the fleet is too small for the requests. Swaps say that it is too small for the adapters: while the
working set fits, adapters are loaded once and stay; when it does not, every load evicts one that is wanted again, and
that shows long before requests queue. What a further replica does to the swap rate is only seen once its slots have
filled, so swaps add one replica at a time, with a pause, and a size that was seen to thrash is not gone back to for a
while unless the fleet is idle.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SHRINK_AT = 0.7
"""A smaller fleet must be this far below its target, so that sizes do not alternate."""

QUIET_SHARE = 0.25
"""Below this share of the target swap rate the working set fits."""


@dataclass(frozen=True)
class Targets:
    """What one replica should carry."""

    requests: float = 32.0
    """Requests running or waiting on a replica."""
    swaps_per_s: float = 1.0
    """Adapters a second that a replica evicts to load others."""
    settle_s: float = 60.0
    """After a replica was added because of swaps, the next one waits for this long."""
    remember_s: float = 1800.0
    """How long a size that thrashed is not gone back to."""


@dataclass(frozen=True)
class Signals:
    """What the replicas of this moment report, summed over them."""

    num_replicas: int
    """Replicas that run."""
    requests: float
    swaps_per_s: float


@dataclass(frozen=True)
class Memory:
    """What is kept from one decision to the next."""

    thrashed_size: int = 0
    """The largest size that was seen to thrash lately; 0 is none."""
    thrashed_at_s: float = 0.0


def decide(signals: Signals, targets: Targets, memory: Memory, now_s: float) -> tuple[int, Memory]:
    """The number of replicas wanted now, at least 1, before Serve's bounds and delays; and what to remember."""
    size = max(1, signals.num_replicas)
    memory = _forget(memory, targets, now_s)
    wanted = max(1, math.ceil(signals.requests / targets.requests))
    if is_idle(signals):
        return 1, memory
    if signals.swaps_per_s / size > targets.swaps_per_s and not _is_settling(size, memory, targets, now_s):
        memory = Memory(size, now_s)
    if memory.thrashed_size:
        wanted = max(wanted, memory.thrashed_size + 1)
    return _with_hysteresis(wanted, size, signals, targets), memory


def is_idle(signals: Signals) -> bool:
    """Whether nothing runs, waits or swaps."""
    return signals.requests == 0 and signals.swaps_per_s == 0


def _forget(memory: Memory, targets: Targets, now_s: float) -> Memory:
    return Memory() if now_s - memory.thrashed_at_s > targets.remember_s else memory


def _is_settling(size: int, memory: Memory, targets: Targets, now_s: float) -> bool:
    """Whether a replica that swaps asked for is still starting or filling its slots."""
    return bool(memory.thrashed_size) and (
        size <= memory.thrashed_size or now_s - memory.thrashed_at_s < targets.settle_s
    )


def _with_hysteresis(wanted: int, size: int, signals: Signals, targets: Targets) -> int:
    """Growing is free; shrinking goes only where the load leaves room, and while swaps are rare one at a time."""
    if wanted >= size:
        return wanted
    roomy = max(wanted, math.ceil(signals.requests / (targets.requests * SHRINK_AT)))
    if signals.swaps_per_s / size > QUIET_SHARE * targets.swaps_per_s:
        return size
    if signals.swaps_per_s > 0:
        roomy = max(roomy, size - 1)
    return min(size, roomy)


class SwapAwarePolicy:
    """`decide` as Ray Serve calls it. Takes the fields of `Targets` as `policy_kwargs`."""

    def __init__(self, **targets: float) -> None:
        self._targets = Targets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The wanted number for an `AutoscalingContext`, and the state that Serve hands back next time."""
        kept = context.policy_state or {}
        memory = Memory(**{name: kept[name] for name in asdict(Memory()) if name in kept})
        signals = read_signals(context.aggregated_metrics or {}, context.current_num_replicas)
        if signals is None:
            return context.target_num_replicas, asdict(memory)
        wanted, memory = decide(signals, self._targets, memory, context.current_time or 0.0)
        return wanted, asdict(memory)


def read_signals(metrics: Mapping[str, Mapping[Any, float]], num_replicas: int) -> Signals | None:
    """What replicas recorded (`record_autoscaling_stats`), or None before the first of them did.

    A replica that has not reported counts as busy as the mean of the others.
    """
    requests, swaps = metrics.get("requests", {}), metrics.get("swaps_per_s", {})
    if not requests or not num_replicas:
        return None
    scale = num_replicas / len(requests)
    return Signals(num_replicas, scale * sum(requests.values()), scale * sum(swaps.values()))
