"""Those who wait for an adapter to become resident, in the order of their arrival. Pure bookkeeping."""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Protocol

from replica.adapters.residents import Resident
from replica.adapters.stats import Source
from replica.adapters.weights import AdapterImage
from replica.errors import ReplicaError


class Claim(Protocol):
    """A lease, seen from those who bring its adapter."""

    def bind(self, resident: Resident) -> None:
        """The adapter is resident, and pinned for this claim."""

    def fail(self, error: ReplicaError) -> None:
        """The adapter will not come."""


class WaiterState(Enum):
    """LOADING: on its way to the host. IN_HAND: wants room in the arena. COPYING: on its way into its slot."""

    LOADING = auto()
    IN_HAND = auto()
    COPYING = auto()


class Waiter:
    """One adapter that is wanted, and the claims of those who want it.

    `image` is set only for the one waiter that holds its image outside the host cache (see `WaiterQueue.holder`).
    """

    def __init__(self, digest: str, arrived_s: float) -> None:
        self.digest = digest
        self.arrived_s = arrived_s
        self.state = WaiterState.LOADING
        self.claims: list[Claim] = []
        self.tier: Source = "host"
        self.load_seconds = 0.0
        self.read_s = 0.0
        self.in_hand_s = arrived_s
        self.image: AdapterImage | None = None
        self.forgotten = False

    def __repr__(self) -> str:
        return f"Waiter({self.digest[:8]}, {self.state.name}, {len(self.claims)} claims)"


class WaiterQueue:
    """First come, first served, for those whose image is in hand.

    `holder` is the one waiter that may keep its image outside the host cache, because that threw it out before there
    was room in the arena. One at a time, so that no number of waiters can outgrow the host budget by more than that.
    """

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self.holder: Waiter | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters))

    def find(self, digest: str) -> Waiter | None:
        """The waiter that another claim may join."""
        return next((one for one in self._waiters if one.digest == digest and not one.forgotten), None)

    def of(self, digest: str) -> list[Waiter]:
        """All waiters for a digest, those for a forgotten one included."""
        return [one for one in self._waiters if one.digest == digest]

    def in_hand(self) -> list[Waiter]:
        """Who wants room in the arena, the oldest first."""
        return [one for one in self._waiters if one.state is WaiterState.IN_HAND]

    def append(self, waiter: Waiter) -> None:
        self._waiters.append(waiter)

    def remove(self, waiter: Waiter) -> None:
        self._waiters.remove(waiter)
        if self.holder is waiter:
            self.holder = None
