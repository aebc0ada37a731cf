"""How much was used within the last minute, in pieces of a second. Knows no tenants."""

from collections import deque
from dataclasses import dataclass

PIECE_S = 1.0


@dataclass(slots=True)
class Piece:
    """What was used in one second."""

    began_s: float
    amount: int = 0
    has_left: bool = False


class SlidingWindow:
    """Sums amounts over the last `window_s` seconds. An amount leaves at most one piece later than it came."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._pieces: deque[Piece] = deque()
        self._total = 0

    def __repr__(self) -> str:
        return f"SlidingWindow({self._total} in {self._window_s:g} s)"

    def add(self, amount: int, now_s: float) -> Piece:
        """Count an amount; returns what `take_back` needs."""
        self.used(now_s)
        if not self._pieces or now_s - self._pieces[-1].began_s >= PIECE_S:
            self._pieces.append(Piece(now_s))
        self._pieces[-1].amount += amount
        self._total += amount
        return self._pieces[-1]

    def take_back(self, piece: Piece, amount: int) -> None:
        """Give back a part of what was counted, where it was counted: what has left the window stays gone."""
        if not piece.has_left:
            piece.amount -= amount
            self._total -= amount

    def used(self, now_s: float) -> int:
        """What was used within the window."""
        while self._pieces and now_s - self._pieces[0].began_s >= self._window_s + PIECE_S:
            left = self._pieces.popleft()
            left.has_left = True
            self._total -= left.amount
        return self._total

    def wait_s(self, room: int, now_s: float) -> float:
        """Seconds until `room` of what is in the window has left it; the whole window where it never held so much."""
        gone = 0
        for piece in self._pieces:
            gone += piece.amount
            if gone >= room:
                return max(0.0, piece.began_s + self._window_s + PIECE_S - now_s)
        return self._window_s
