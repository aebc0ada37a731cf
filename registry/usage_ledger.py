"""Use, added up until the registry has it: one batch at a time, the same again until it is acknowledged.

Knows no network. Used from one thread.
"""

import logging
import time
import uuid
from collections.abc import Callable

from registry.usage_records import HOUR_S, Consumer, UsageBatch, UsageEntry

logger = logging.getLogger(__name__)
MAX_ENTRIES = 20_000
BATCH_ENTRIES = 2_000

Sums = list[int]
"""Requests, prompt tokens, output tokens, nanoseconds of the device."""


class UsageLedger:
    """What this process has counted and the registry has not acknowledged.

    With more than `max_entries` waiting (the registry is away for long) the hours are merged into this one; only when
    there are still too many, what new consumers use is dropped, and `num_lost` counts it.
    """

    def __init__(
        self, member_id: str, wall_clock: Callable[[], float] = time.time, *, max_entries: int = MAX_ENTRIES
    ) -> None:
        self._source = f"{member_id[:128]}/{uuid.uuid4().hex[:12]}"
        self._wall_clock = wall_clock
        self._max_entries = max_entries
        self._waiting: dict[tuple[int, Consumer], Sums] = {}
        self._sent: UsageBatch | None = None
        self._sequence = 0
        self.num_lost = 0

    def __repr__(self) -> str:
        sent = None if self._sent is None else self._sent.sequence
        return f"UsageLedger({self._source}, waiting={len(self._waiting)}, sent={sent}, lost={self.num_lost})"

    def add(
        self,
        consumer: Consumer,
        *,
        requests: int = 0,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        device_ns: int = 0,
    ) -> None:
        """Count what was used just now."""
        key = (int(self._wall_clock()) // HOUR_S * HOUR_S, consumer)
        sums = self._waiting.get(key) or self._open(key)
        if sums is None:
            return
        sums[0] += requests
        sums[1] += prompt_tokens
        sums[2] += output_tokens
        sums[3] += device_ns

    def batch(self) -> UsageBatch | None:
        """What to hand over now: the last batch as long as it is not acknowledged, else what has come since."""
        if self._sent is None and self._waiting:
            keys = list(self._waiting)[:BATCH_ENTRIES]
            entries = tuple(_entry(*key, self._waiting.pop(key)) for key in keys)
            self._sequence += 1
            self._sent = UsageBatch(source=self._source, sequence=self._sequence, entries=entries)
        return self._sent

    def acknowledged(self, sequence: int) -> None:
        """The registry has this batch; an acknowledgement that comes late changes nothing."""
        if self._sent is not None and self._sent.sequence == sequence:
            self._sent = None

    def _open(self, key: tuple[int, Consumer]) -> Sums | None:
        hour_s, _ = key
        oldest_s = next((waiting_s for waiting_s, _ in self._waiting), hour_s)
        if len(self._waiting) >= self._max_entries and oldest_s < hour_s:
            self._merge_into(hour_s)
        if key not in self._waiting and len(self._waiting) >= self._max_entries:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.error("use of %d consumers waits for the registry; that of others is lost", len(self._waiting))
            return None
        return self._waiting.setdefault(key, [0, 0, 0, 0])

    def _merge_into(self, hour_s: int) -> None:
        merged: dict[tuple[int, Consumer], Sums] = {}
        for (_, consumer), sums in self._waiting.items():
            into = merged.setdefault((hour_s, consumer), [0, 0, 0, 0])
            for place, value in enumerate(sums):
                into[place] += value
        self._waiting = merged


def _entry(hour_s: int, consumer: Consumer, sums: Sums) -> UsageEntry:
    requests, prompt_tokens, output_tokens, device_ns = sums
    return UsageEntry(
        hour_s=hour_s,
        **consumer._asdict(),
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        device_ns=device_ns,
    )
