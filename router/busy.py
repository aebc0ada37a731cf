"""Request-seconds by adapter: how long, summed over requests, each was being served. The measure of demand."""

from collections.abc import Callable


class BusyTime:
    """Integrates requests in flight over time, by key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: dict[str | None, int] = {}
        self._since_s: dict[str | None, float] = {}
        self._busy_s: dict[str | None, float] = {}
        self._taken_at_s = clock()

    def begin(self, key: str | None) -> None:
        self._settle(key, +1)

    def end(self, key: str | None) -> None:
        self._settle(key, -1)

    def _settle(self, key: str | None, change: int) -> None:
        now_s, before = self._clock(), self._in_flight.get(key, 0)
        self._busy_s[key] = self._busy_s.get(key, 0.0) + before * (now_s - self._since_s.get(key, now_s))
        self._in_flight[key], self._since_s[key] = before + change, now_s
        if not self._in_flight[key]:
            del self._in_flight[key], self._since_s[key]

    def take(self) -> tuple[dict[str | None, float], float]:
        """Request-seconds of every key used since the last call, and how long ago that was."""
        for key in tuple(self._in_flight):
            self._settle(key, 0)
        now_s = self._clock()
        busy_s, self._busy_s = self._busy_s, {}
        interval_s, self._taken_at_s = now_s - self._taken_at_s, now_s
        return busy_s, interval_s
