"""Finds stop strings in text that arrives in pieces, and never lets a part of one out.

The match that is complete first wins, and of those the one that begins first, so the cut is the same however the
text is split.
"""

from collections.abc import Sequence


class StopMatcher:
    """Watches one choice's text. Once stopped it takes no more."""

    __slots__ = ("_firsts", "_held", "_max_hold", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops, "a matcher without stop strings"
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._max_hold = max(map(len, stops)) - 1
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string. Sets `stopped` at a match, which is cut off."""
        assert not self.stopped, "text after the stop"
        buffer = self._held + text
        cut = self._find(buffer)
        if cut is not None:
            self.stopped, self._held = True, ""
            return buffer[:cut]
        keep = len(buffer) - self._num_held(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """The held text: the choice ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> int | None:
        """Where the winning stop string begins."""
        matches = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _num_held(self, buffer: str) -> int:
        """Length of the longest suffix that a stop string begins with."""
        for size in range(min(self._max_hold, len(buffer)), 0, -1):
            start = len(buffer) - size
            if buffer[start] in self._firsts and any(stop.startswith(buffer[start:]) for stop in self._stops):
                return size
        return 0
