"""Which adapters are to be brought to their homes now, by the clock. Pure: the time comes with every call."""

import math
from collections.abc import Iterable

from registry.types import AdapterRecord, Preload
from registry.usage_records import DAY_S


class PreloadClock:
    """Remembers which turn of its schedule each adapter has had. A gateway that starts has had none of `every_s`, and
    those of `at` that are over."""

    def __init__(self) -> None:
        self._turns: dict[str, tuple[Preload, int]] = {}
        self._owed: frozenset[str] = frozenset()

    def owe(self, names: Iterable[str]) -> None:
        """These could not be brought: they are due at the next call again, while they have a schedule."""
        self._owed = frozenset(names)

    def due(self, adapters: Iterable[AdapterRecord], wall_s: float) -> list[str]:
        """The names whose turn came since the last call, and those that are owed."""
        due, turns = [], {}
        for adapter in adapters:
            preload = adapter.preload
            if preload is None:
                continue
            now = turns[adapter.name] = (preload, turn(preload, wall_s))
            before = self._turns.get(adapter.name)
            is_new = before is None or before[0] != preload
            if adapter.name in self._owed or (now != before and (preload.at is None or not is_new)):
                due.append(adapter.name)
        self._turns, self._owed = turns, frozenset()
        return due


def turn(preload: Preload, wall_s: float) -> int:
    """The number of the turn at that time: the same in every gateway."""
    if preload.every_s is not None:
        return math.floor(wall_s / preload.every_s)
    hours, minutes = (preload.at or "00:00").split(":")
    return math.floor((wall_s - 3600 * int(hours) - 60 * int(minutes)) / DAY_S)
