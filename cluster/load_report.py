"""What a replica tells Serve's autoscaler of itself: work on hand, and how fast adapters push one another out."""

import time
from collections.abc import Callable

from replica.messages import ReplicaStatus


class LoadReport:
    """Turns statuses, in order, into figures; the swap rate is that between two of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, int] | None = None

    def figures(self, status: ReplicaStatus) -> dict[str, float]:
        """`requests` running and waiting, and `swaps_per_s`: evictions from slots a second since the last call."""
        now_s = self._clock()
        then_s, num_evictions = self._last or (now_s, status.num_evictions)
        self._last = (now_s, status.num_evictions)
        elapsed_s = now_s - then_s
        swaps = (status.num_evictions - num_evictions) / elapsed_s if elapsed_s > 0 else 0.0
        return {"requests": float(status.num_running + status.num_waiting), "swaps_per_s": max(0.0, swaps)}
