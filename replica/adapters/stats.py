"""What the adapter tiers count. Knows nothing of how figures are exported."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Source = Literal["host", "node", "blob"]
"""Where the bytes of a load came from."""

SOURCES: tuple[Source, ...] = ("host", "node", "blob")
STAGES = ("fetch", "read", "convert", "wait", "copy", "publish", "total")
"""fetch: blob store to node; read: node to host image, and convert: the part of that which casts and checks values;
wait: until the step loop has seen it and there is room; copy: host to slot; publish: until the step loop has seen that;
total."""


class LoadObserver(Protocol):
    """Receives every timed stage of a load, from any thread; for histograms."""

    def observe(self, stage: str, seconds: float, source: Source) -> None:
        """`stage` is one of STAGES; `source` says where the bytes came from."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A view of the adapter tiers at one moment; counts are since the start.

    `slots_by_state` has `free`, `loading`, `resident` (nobody uses it) and `pinned`. `num_hits` counts acquires of a
    resident adapter, `num_misses` all others. `loads` counts copies into slots by where the bytes came from: `host`,
    `node` or `blob`. `evictions` is by tier (`slot`, `host`, `node`) and cause: `room` for another one, `withdrawn`
    from service, `damaged` bytes. `load_seconds` is stage -> (count, sum).
    """

    num_slots: int
    slots_by_state: Mapping[str, int]
    resident: tuple[str, ...]
    host_cached: tuple[str, ...]
    host_bytes: int
    host_free_bytes: int
    arena_bytes: int
    arena_free_bytes: int
    num_waiting: int
    num_hits: int
    num_misses: int
    num_failures: int
    loads: Mapping[str, int]
    evictions: Mapping[tuple[str, str], int]
    load_seconds: Mapping[str, tuple[int, float]]


class LoadTimes:
    """Counts and sums of the stages; safe from any thread."""

    def __init__(self, observer: LoadObserver | None = None) -> None:
        self._observer = observer
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._lock = threading.Lock()

    def observe(self, stage: str, seconds: float, source: Source) -> None:
        with self._lock:
            self._counts[stage] += 1
            self._sums[stage] += seconds
        if self._observer is not None:
            self._observer.observe(stage, seconds, source)

    def snapshot(self) -> dict[str, tuple[int, float]]:
        with self._lock:
            return {stage: (self._counts[stage], self._sums[stage]) for stage in STAGES}
