"""When the tokens of one prompt came, in plain numbers. Knows no series: whoever watches takes what has gathered.

This runs for every message of every stream. A change of a series each would cost several times as much, most of it in
caches that have gone cold since the last message.
"""

from collections.abc import Callable

MAX_GAPS = 256
"""Gaps that gather before they are handed over, however long nobody asks."""


class Pace:
    """`first_s` is when the first token came, by `clock`; `num_tokens` how many came."""

    __slots__ = ("_clock", "_gaps_s", "_last_s", "_on_full", "first_s", "num_tokens")

    def __init__(self, clock: Callable[[], float], on_full: Callable[[], None]) -> None:
        self._clock = clock
        self._on_full = on_full
        self._gaps_s: list[float] = []
        self._last_s = 0.0
        self.first_s: float | None = None
        self.num_tokens = 0

    def arrived(self, num_tokens: int, num_open: int) -> None:
        """A message has brought tokens of the choices that are open.

        The gap between two tokens of a choice is taken for all of them at once: its mean over the message's tokens.
        """
        now_s = self._clock()
        self.num_tokens += num_tokens
        if self.first_s is None:
            self.first_s = now_s
        else:
            gap_s = now_s - self._last_s
            gaps_s = self._gaps_s
            gaps_s.append(gap_s if num_tokens == num_open else gap_s * num_open / num_tokens)
            if len(gaps_s) >= MAX_GAPS:
                self._on_full()
        self._last_s = now_s

    def take_gaps_s(self) -> list[float]:
        """The gaps since the last call, in seconds, one a message."""
        taken, self._gaps_s = self._gaps_s, []
        return taken
