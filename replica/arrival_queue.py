"""What admission policies are, and the simplest of them: arrival order. Knows requests' keys, not tokens or devices."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What a waiting request tells the queue: `cost` is what its admission charges, in tokens."""

    @property
    def key(self) -> Hashable: ...
    @property
    def tenant(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def cost(self) -> int: ...


T = TypeVar("T", bound=Queued)


@dataclass(frozen=True, slots=True)
class Preference(Generic[T]):
    """Whom to take ahead of their turn: requests that `likes` names, at the time `now_s`.

    A request that was first passed `patience_s` seconds ago or earlier is passed no more.
    """

    likes: Callable[[T], bool]
    patience_s: float
    now_s: float


class WaitingQueue(Protocol[T]):
    """An admission policy. Within a tenant, the first request in arrival order that may be admitted goes first.

    With a preference, one that it likes may go ahead of one that it does not, for a bounded time. `take_ahead` is for
    when there is no room but for those with a claim: one whose tenant's turn it is, or None. A policy that charges
    ahead may `follow` how many of the output tokens it charged a tenant for have not been sampled yet.
    """

    def push(self, item: T) -> None: ...
    def take(self, may_admit: Callable[[T], bool], preference: Preference[T] | None = None) -> T | None: ...
    def take_ahead(self, may_admit: Callable[[T], bool], claims: Callable[[T], bool]) -> T | None: ...
    def remove(self, item: T) -> bool: ...
    def refund(self, tenant: str, tokens: int) -> None: ...
    def deficits(self) -> dict[str, float]: ...
    def follow(self, outstanding: Callable[[str], int]) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T]: ...


class ArrivalQueue(Generic[T]):
    """First come, first served, whoever asks."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._passed_at_s: dict[Hashable, float] = {}
        """When each of those that were passed was first passed."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(waiting={len(self)})"

    def push(self, item: T) -> None:
        self._items[item.key] = item

    def peek(self, may_admit: Callable[[T], bool]) -> T | None:
        """The first request that may be admitted."""
        return next((item for item in self._items.values() if may_admit(item)), None)

    def choose(self, may_admit: Callable[[T], bool], preference: Preference[T] | None) -> T | None:
        """The first request that may be admitted, or a liked one behind it, if all in between may be passed."""
        first = self.peek(may_admit)
        if preference is None:
            return first
        for item in filter(may_admit, self._items.values()):
            if preference.likes(item):
                return item
            if not self.may_pass(item, preference):
                break
        return first

    def may_pass(self, item: T, preference: Preference[T]) -> bool:
        """Whether a liked request may go ahead of `item`."""
        passed_at_s = self._passed_at_s.get(item.key, preference.now_s)
        return not preference.likes(item) and preference.now_s - passed_at_s < preference.patience_s

    def note_passed(self, item: T, now_s: float) -> None:
        """Another went although it was the turn of `item`."""
        self._passed_at_s.setdefault(item.key, now_s)

    def take(self, may_admit: Callable[[T], bool], preference: Preference[T] | None = None) -> T | None:
        """Remove and return the request that `choose` names."""
        item = self.choose(may_admit, preference)
        if item is not None:
            self.take_chosen(item, may_admit, preference)
        return item

    def take_chosen(self, item: T, may_admit: Callable[[T], bool], preference: Preference[T] | None) -> None:
        """Remove what `choose` named, and note whom it passed."""
        if preference is not None:
            for passed in takewhile(lambda other: other is not item, self._items.values()):
                if may_admit(passed):
                    self.note_passed(passed, preference.now_s)
        self.remove(item)

    def take_ahead(self, may_admit: Callable[[T], bool], claims: Callable[[T], bool]) -> T | None:
        """Nobody has a claim on anybody."""
        return None

    def remove(self, item: T) -> bool:
        """Take `item` out; False when it was not waiting."""
        self._passed_at_s.pop(item.key, None)
        return self._items.pop(item.key, None) is not None

    def refund(self, tenant: str, tokens: int) -> None:
        """Nothing was charged, so nothing comes back."""

    def deficits(self) -> dict[str, float]:
        """Nobody has any."""
        return {}

    def follow(self, outstanding: Callable[[str], int]) -> None:
        """Arrival order asks nobody."""
