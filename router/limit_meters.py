"""What a tenant uses of one limit at this gateway, against the part of the limit that this gateway holds."""

import math
from collections.abc import Callable
from typing import Protocol

from registry.types import LimitShare, LimitUse
from router.sliding_window import Piece, SlidingWindow


class Counter(Protocol):
    """Where amounts are counted. `wait_s` is how long until `room` of it is free again."""

    def used(self, now_s: float) -> int: ...
    def add(self, amount: int, now_s: float) -> Piece: ...
    def take_back(self, piece: Piece, amount: int) -> None: ...
    def wait_s(self, room: int, now_s: float) -> float: ...


class InFlight:
    """Counts what is held at this moment. Same methods as SlidingWindow; nothing leaves by itself."""

    def __init__(self) -> None:
        self._held = 0

    def used(self, now_s: float) -> int:
        return self._held

    def add(self, amount: int, now_s: float) -> Piece:
        self._held += amount
        return Piece(now_s, amount)

    def take_back(self, piece: Piece, amount: int) -> None:
        self._held -= amount

    def wait_s(self, room: int, now_s: float) -> float:
        return 1.0


COUNTERS: dict[str, Callable[[], Counter]] = {
    "max_concurrent": InFlight,
    "requests_per_minute": SlidingWindow,
    "tokens_per_minute": SlidingWindow,
}


class Meter:
    """One limit of one tenant. `granted` is this gateway's part of it, None until the registry has said.

    The part is never given up below what is used, so the parts of all gateways bound what all of them use.
    """

    def __init__(self, limit: str, granted: int | None) -> None:
        self.limit = limit
        self.counter = COUNTERS[limit]()
        self.granted = granted
        self._target: int | None = None
        self._refused = 0
        self._wanted = 0

    def __repr__(self) -> str:
        return f"Meter({self.limit}, {self.counter!r}, granted {self.granted}, target {self._target})"

    def has_room(self, amount: int, now_s: float) -> bool:
        """Whether `amount` more may be used: not above the target either, or a busy gateway would never come down."""
        return self.counter.used(now_s) + amount <= self._room

    @property
    def _room(self) -> int:
        granted = self.granted or 0
        return granted if self._target is None else min(granted, self._target)

    def refuse(self, amount: int, now_s: float) -> int:
        """Note that so much was asked for in vain; returns in how many seconds to try again."""
        self._refused += amount
        missing = self.counter.used(now_s) + amount - self._room
        return max(1, math.ceil(self.counter.wait_s(missing, now_s)))

    def use(self, tenant: str, ceiling: int, now_s: float) -> LimitUse | None:
        """What to tell the registry, None when there is no news. Lowers the part to its target as far as it is free;
        `ceiling` is the whole limit."""
        used = self.counter.used(now_s)
        wanted = min(ceiling, max(used + self._refused, self._wanted // 2))
        target = ceiling if self._target is None else min(self._target, ceiling)
        held = min(self.granted or 0, max(used, target))
        has_news = self.granted is None or used or wanted or self._wanted or held < self.granted
        self._refused, self._wanted = 0, wanted
        if self.granted is not None:
            self.granted = held
        return LimitUse(tenant=tenant, limit=self.limit, held=held, wanted=wanted) if has_news else None

    def take(self, share: LimitShare) -> None:
        """The registry's answer."""
        self.granted, self._target = share.granted, share.target

    def is_idle(self, now_s: float) -> bool:
        return not (self.counter.used(now_s) or self._refused or self._wanted)
