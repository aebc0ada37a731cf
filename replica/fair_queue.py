"""The order in which waiting requests are admitted. Knows tenants, weights and costs, not tokens or devices."""

import math
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
    when there is no room but for those with a claim: one that its tenant can pay for in this round, or None.
    """

    def push(self, item: T) -> None: ...
    def take(self, may_admit: Callable[[T], bool], preference: Preference[T] | None = None) -> T | None: ...
    def take_ahead(self, may_admit: Callable[[T], bool], claims: Callable[[T], bool]) -> T | None: ...
    def remove(self, item: T) -> bool: ...
    def refund(self, tenant: str, tokens: int) -> None: ...
    def deficits(self) -> dict[str, float]: ...
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


class _Tenant(Generic[T]):
    """A tenant with waiting requests: its queue and the tokens it may still be charged."""

    def __init__(self) -> None:
        self.queue: ArrivalQueue[T] = ArrivalQueue()
        self.deficit = 0.0
        self.weight = 1.0

    def push(self, item: T) -> None:
        self.queue.push(item)
        self.weight = item.weight


class FairQueue(Generic[T]):
    """Deficit round robin over tenants (Shreedhar and Varghese, SIGCOMM 1995), charged in tokens.

    Every round adds `quantum` x weight tokens to each tenant that has a request to admit; a request goes when its
    tenant's deficit covers its cost. A tenant whose requests may not be admitted just now keeps its deficit and earns
    none; a tenant with nothing waiting has none. Rounds in which nobody could afford anything are taken in one stride,
    so a call costs one pass over the tenants however large the costs are.

    A liked request that goes ahead is charged to its own tenant, out of what that has in this round: its quantum may
    come early, never twice. So no round begins while somebody's turn is passed, and the shares stay as they were.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._ring: OrderedDict[str, _Tenant[T]] = OrderedDict()
        """Tenants with waiting requests; the first one has the turn."""
        self._paid: set[str] = set()
        """Who has had this round's quantum: the first of the ring, and those that went ahead of it."""
        self._left: dict[str, float] = {}
        """What those that went ahead and have nothing waiting left of it; theirs again should they return in time."""

    def __len__(self) -> int:
        return sum(len(tenant.queue) for tenant in self._ring.values())

    def __iter__(self) -> Iterator[T]:
        return (item for tenant in self._ring.values() for item in tenant.queue)

    def __repr__(self) -> str:
        return f"FairQueue(waiting={len(self)}, tenants={len(self._ring)}, quantum={self._quantum})"

    def deficit(self, tenant: str) -> float:
        """Tokens that `tenant` may be charged before it must wait for its next turn; 0 when nothing waits."""
        return self._ring[tenant].deficit if tenant in self._ring else 0.0

    def deficits(self) -> dict[str, float]:
        """The deficit of every tenant with waiting requests. Any thread may ask."""
        return {name: tenant.deficit for name, tenant in list(self._ring.items())}

    def push(self, item: T) -> None:
        if item.tenant not in self._ring:
            self._ring[item.tenant] = _Tenant()
            self._ring[item.tenant].deficit = self._left.pop(item.tenant, 0.0)
        self._ring[item.tenant].push(item)

    def take(self, may_admit: Callable[[T], bool], preference: Preference[T] | None = None) -> T | None:
        """Remove, charge and return the request whose turn it is among those that may be admitted, or a liked one."""
        turn = self._next_turn(may_admit)
        if turn is None:
            return None
        item = turn if preference is None else self._ahead_of(turn, may_admit, preference)
        self._charge(item, may_admit, preference)
        return item

    def take_ahead(self, may_admit: Callable[[T], bool], claims: Callable[[T], bool]) -> T | None:
        """Remove, charge and return a tenant's first request if it `claims` its place; no round begins for it."""
        if self._next_turn(may_admit) is None:
            return None
        for name, tenant in self._ring.items():
            item = tenant.queue.peek(may_admit)
            if item is not None and self._could_pay(name, tenant, item) and claims(item):
                self._charge(item, may_admit, None)
                return item
        return None

    def _charge(self, item: T, may_admit: Callable[[T], bool], preference: Preference[T] | None) -> None:
        tenant = self._ring[item.tenant]
        self._pay(item.tenant, tenant, item)
        tenant.deficit -= item.cost
        tenant.queue.take_chosen(item, may_admit, preference)
        self._forget_idle(item.tenant)

    def _next_turn(self, may_admit: Callable[[T], bool]) -> T | None:
        """Go round until the first of the ring can pay for its request, and return that."""
        wishes = self._wishes(may_admit)
        if not wishes:
            return None
        self._skip_idle_rounds(wishes)
        while True:
            name, tenant = next(iter(self._ring.items()))
            item = wishes.get(name)
            if item is not None and self._pay(name, tenant, item):
                return item
            self._pass_turn(name)

    def _ahead_of(self, turn: T, may_admit: Callable[[T], bool], preference: Preference[T]) -> T:
        """A liked request that goes although it is the turn of `turn`, or `turn` itself."""
        owner = self._ring[turn.tenant].queue
        if not owner.may_pass(turn, preference):
            return turn
        for name, tenant in self._ring.items():
            item = tenant.queue.choose(may_admit, preference)
            if item is not None and preference.likes(item) and self._could_pay(name, tenant, item):
                owner.note_passed(turn, preference.now_s)
                return item
        return turn

    def _wishes(self, may_admit: Callable[[T], bool]) -> dict[str, T]:
        peeked = ((name, tenant.queue.peek(may_admit)) for name, tenant in self._ring.items())
        return {name: item for name, item in peeked if item is not None}

    def _skip_idle_rounds(self, wishes: dict[str, T]) -> None:
        """Pay out at once all rounds but the last before somebody can afford its request."""
        rounds = min(self._num_rounds(name, item) for name, item in wishes.items()) - 1
        if rounds > 0:
            for name in wishes:
                self._ring[name].deficit += rounds * self._earns(self._ring[name])

    def _num_rounds(self, name: str, item: T) -> int:
        tenant = self._ring[name]
        return math.ceil((item.cost - tenant.deficit) / self._earns(tenant))

    def _earns(self, tenant: _Tenant[T]) -> float:
        return max(1.0, self._quantum * tenant.weight)

    def _pay(self, name: str, tenant: _Tenant[T], item: T) -> bool:
        """Whether the tenant can pay for `item`, after it was given this round's quantum if that takes it."""
        if tenant.deficit < item.cost and name not in self._paid:
            self._paid.add(name)
            tenant.deficit += self._earns(tenant)
        return tenant.deficit >= item.cost

    def _could_pay(self, name: str, tenant: _Tenant[T], item: T) -> bool:
        return tenant.deficit + (0 if name in self._paid else self._earns(tenant)) >= item.cost

    def _pass_turn(self, name: str) -> None:
        self._ring.move_to_end(name)
        self._end_turn(name)

    def _end_turn(self, name: str) -> None:
        """Others that went ahead and are still here had their quantum early; those that left owe nothing now."""
        self._paid.discard(name)
        self._paid.intersection_update(self._ring)
        self._left.clear()

    def _forget_idle(self, name: str) -> None:
        if not len(self._ring[name].queue):
            had_turn = next(iter(self._ring)) == name
            tenant = self._ring.pop(name)
            if had_turn:
                self._end_turn(name)
            elif name in self._paid:
                self._left[name] = tenant.deficit

    def remove(self, item: T) -> bool:
        """Take `item` out without charging it; False when it was not waiting."""
        tenant = self._ring.get(item.tenant)
        if tenant is None or not tenant.queue.remove(item):
            return False
        self._forget_idle(item.tenant)
        return True

    def refund(self, tenant: str, tokens: int) -> None:
        """Give back up to one quantum of what was charged and not used; an idle tenant gets nothing."""
        if tenant in self._ring and tokens > 0:
            entry = self._ring[tenant]
            entry.deficit += min(tokens, self._earns(entry))
