"""The order in which waiting requests are admitted. Knows tenants, weights and costs, not tokens or devices."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
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


class WaitingQueue(Protocol[T]):
    """An admission policy. Within a tenant, the first request in arrival order that may be admitted goes first."""

    def push(self, item: T) -> None: ...
    def take(self, may_admit: Callable[[T], bool]) -> T | None: ...
    def remove(self, item: T) -> bool: ...
    def refund(self, tenant: str, tokens: int) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T]: ...


class ArrivalQueue(Generic[T]):
    """First come, first served, whoever asks."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, T] = OrderedDict()

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

    def take(self, may_admit: Callable[[T], bool]) -> T | None:
        """Remove and return the first request that may be admitted."""
        item = self.peek(may_admit)
        if item is not None:
            del self._items[item.key]
        return item

    def remove(self, item: T) -> bool:
        """Take `item` out; False when it was not waiting."""
        return self._items.pop(item.key, None) is not None

    def refund(self, tenant: str, tokens: int) -> None:
        """Nothing was charged, so nothing comes back."""


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
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._ring: OrderedDict[str, _Tenant[T]] = OrderedDict()
        """Tenants with waiting requests; the first one has the turn and has had this round's quantum if `_paid`."""
        self._paid = False

    def __len__(self) -> int:
        return sum(len(tenant.queue) for tenant in self._ring.values())

    def __iter__(self) -> Iterator[T]:
        return (item for tenant in self._ring.values() for item in tenant.queue)

    def __repr__(self) -> str:
        return f"FairQueue(waiting={len(self)}, tenants={len(self._ring)}, quantum={self._quantum})"

    def deficit(self, tenant: str) -> float:
        """Tokens that `tenant` may be charged before it must wait for its next turn; 0 when nothing waits."""
        return self._ring[tenant].deficit if tenant in self._ring else 0.0

    def push(self, item: T) -> None:
        if item.tenant not in self._ring:
            self._ring[item.tenant] = _Tenant()
        self._ring[item.tenant].push(item)

    def take(self, may_admit: Callable[[T], bool]) -> T | None:
        """Remove, charge and return the request whose turn it is among those that may be admitted."""
        wishes = self._wishes(may_admit)
        if not wishes:
            return None
        self._skip_idle_rounds(wishes)
        while True:
            name, tenant = next(iter(self._ring.items()))
            item = wishes.get(name)
            if item is not None and self._affords(tenant, item):
                return self._charge(name, tenant, item)
            self._pass_turn(name)

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

    def _affords(self, tenant: _Tenant[T], item: T) -> bool:
        if tenant.deficit < item.cost and not self._paid:
            self._paid = True
            tenant.deficit += self._earns(tenant)
        return tenant.deficit >= item.cost

    def _charge(self, name: str, tenant: _Tenant[T], item: T) -> T:
        tenant.deficit -= item.cost
        tenant.queue.remove(item)
        self._forget_idle(name)
        return item

    def _pass_turn(self, name: str) -> None:
        self._ring.move_to_end(name)
        self._paid = False

    def _forget_idle(self, name: str) -> None:
        if not len(self._ring[name].queue):
            if next(iter(self._ring)) == name:
                self._paid = False
            del self._ring[name]

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
