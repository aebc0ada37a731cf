"""Whose turn it is among tenants with waiting requests. Knows weights and costs, not tokens or devices."""

import math
from collections.abc import Callable, Iterator
from typing import Generic

from replica.arrival_queue import ArrivalQueue, Preference, T

LEAD_QUANTA = 2
"""A tenant with a long line may claim places of others once it is so many quanta behind them."""


class _Tenant(Generic[T]):
    """A tenant's waiting requests, what they cost together, and what it was charged for a unit of its weight."""

    def __init__(self) -> None:
        self.queue: ArrivalQueue[T] = ArrivalQueue()
        self.weight = 1.0
        self.charged = -math.inf
        self.cost = 0

    def push(self, item: T) -> None:
        self.queue.push(item)
        self.weight = item.weight
        self.cost += item.cost

    def charge(self, tokens: float) -> None:
        self.charged += tokens / self.weight


class FairQueue(Generic[T]):
    """Deficit round robin over tenants (Shreedhar and Varghese, SIGCOMM 1995), charged in tokens on admission.

    Every round gives `quantum` x weight tokens to each tenant that has a request to admit. All earn alike, so what they
    earned is one number for a unit of weight, and a tenant's deficit is that less what it was charged. One whose
    requests may not be admitted just now keeps its deficit and earns none; one with nothing waiting has none.

    The turn is that of the tenant which was *served* least for its weight: what it was charged, less the output tokens
    that its running requests are still to get. In this order shares of the work done drift apart by no more than under
    virtual token counters (Sheng et al., OSDI 2024); in the order of charges they would by all that is still to come.
    Rounds are paid until the one with the turn can pay, all in one stride.

    One that comes back begins a quantum below the least served of those that waited then, or where it stood if that is
    more. The quantum is for what it sends at once: it lapses when a request has to wait. Where others stand who have
    nothing waiting is known as long as it is more than a newcomer's place, and somebody waits or they have work here.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._tenants: dict[str, _Tenant[T]] = {}
        """Those with waiting requests."""
        self._away: dict[str, _Tenant[T]] = {}
        """Those with none, as long as they stand worse than a newcomer would."""
        self._earned = 0.0
        """Tokens for a unit of weight, since ever."""
        self._level = 0.0
        """The most that the least served of those that waited ever was served."""
        self._outstanding: Callable[[str], int] = lambda tenant: 0

    def __len__(self) -> int:
        return sum(len(tenant.queue) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[T]:
        return (item for tenant in self._tenants.values() for item in tenant.queue)

    def __repr__(self) -> str:
        return f"FairQueue(waiting={len(self)}, tenants={len(self._tenants)}, quantum={self._quantum})"

    def deficit(self, tenant: str) -> float:
        """Tokens that `tenant` may be charged before it must earn more; 0 when nothing waits."""
        entry = self._tenants.get(tenant)
        return 0.0 if entry is None else self._deficit(entry)

    def deficits(self) -> dict[str, float]:
        """The deficit of every tenant with waiting requests. Any thread may ask."""
        return {name: self._deficit(tenant) for name, tenant in list(self._tenants.items())}

    def follow(self, outstanding: Callable[[str], int]) -> None:
        """From now on ask `outstanding` how many output tokens, charged to a tenant, have not been sampled yet."""
        self._outstanding = outstanding

    def push(self, item: T) -> None:
        if item.tenant not in self._tenants:
            self._tenants[item.tenant] = self._returning(item)
        self._tenants[item.tenant].push(item)

    def take(self, may_admit: Callable[[T], bool], preference: Preference[T] | None = None) -> T | None:
        """Remove, charge and return the request whose turn it is among those that may be admitted, or a liked one."""
        wishes = self._wishes(may_admit)
        if not wishes:
            return None
        turn = wishes[min(wishes, key=self._served)]
        self._earn(turn, wishes)
        item = turn if preference is None else self._ahead_of(turn, may_admit, preference)
        self._charge(item, may_admit, preference)
        return item

    def take_ahead(self, may_admit: Callable[[T], bool], claims: Callable[[T], bool]) -> T | None:
        """The same without room, for the first request of a tenant with the turn if it `claims` its place.

        A tenant with a long line waits for room, as it would do with any order, unless it is far behind the others that
        wait, and behind somebody of those that have work here and no line.
        """
        wishes = self._wishes(may_admit)
        served = {name: self._served(name) for name in wishes}
        for name in sorted(served, key=served.__getitem__):
            lead = min((each for other, each in served.items() if other != name), default=math.inf) - served[name]
            if lead >= 0 and self._may_claim(name, lead) and claims(wishes[name]):
                self._earn(wishes[name], wishes)
                self._charge(wishes[name], may_admit, None)
                return wishes[name]
        self._lapse()
        return None

    def remove(self, item: T) -> bool:
        """Take `item` out without charging it; False when it was not waiting."""
        tenant = self._tenants.get(item.tenant)
        if tenant is None or not tenant.queue.remove(item):
            return False
        self._leave(item, tenant)
        return True

    def refund(self, tenant: str, tokens: int) -> None:
        """Give back what was charged and not used; below 0, charge what was used beyond. To the forgotten nothing."""
        entry = self._tenants.get(tenant) or self._away.get(tenant)
        if entry is not None:
            entry.charge(-tokens)
        self._forget()

    def _wishes(self, may_admit: Callable[[T], bool]) -> dict[str, T]:
        peeked = ((name, tenant.queue.peek(may_admit)) for name, tenant in self._tenants.items())
        return {name: item for name, item in peeked if item is not None}

    def _served(self, name: str) -> float:
        """Tokens for a unit of weight, the prompts of what was admitted with them."""
        tenant = self._tenants.get(name) or self._away[name]
        return tenant.charged - self._outstanding(name) / tenant.weight

    def _deficit(self, tenant: _Tenant[T]) -> float:
        return (self._earned - tenant.charged) * tenant.weight

    def _earn(self, item: T, wishes: dict[str, T]) -> None:
        """Pay rounds until the tenant of `item` can pay for it; who may not be admitted stays where it is."""
        tenant = self._tenants[item.tenant]
        rounds = max(0, math.ceil((item.cost - self._deficit(tenant)) / (self._quantum * tenant.weight)))
        self._earned += rounds * self._quantum
        for name in self._tenants.keys() - wishes.keys():
            self._tenants[name].charged += rounds * self._quantum

    def _charge(self, item: T, may_admit: Callable[[T], bool], preference: Preference[T] | None) -> None:
        tenant = self._tenants[item.tenant]
        tenant.charge(item.cost)
        tenant.queue.take_chosen(item, may_admit, preference)
        self._leave(item, tenant)

    def _ahead_of(self, turn: T, may_admit: Callable[[T], bool], preference: Preference[T]) -> T:
        """A liked request that its tenant can pay for without another round, although it is the turn of `turn`."""
        owner = self._tenants[turn.tenant].queue
        if not owner.may_pass(turn, preference):
            return turn
        for name in sorted(self._tenants, key=self._served):
            item = self._tenants[name].queue.choose(may_admit, preference)
            if item is not None and preference.likes(item) and self._deficit(self._tenants[name]) >= item.cost:
                owner.note_passed(turn, preference.now_s)
                return item
        return turn

    def _may_claim(self, name: str, lead: float) -> bool:
        tenant = self._tenants[name]
        if len(tenant.queue) == 1 or tenant.cost <= self._quantum:
            return True
        at_work = [self._served(other) for other in self._away if self._outstanding(other)]
        return min(lead, max(at_work, default=math.inf) - self._served(name)) >= LEAD_QUANTA * self._quantum

    def _returning(self, item: T) -> _Tenant[T]:
        """The entry of a tenant that had nothing waiting."""
        if self._tenants:
            self._level = max(self._level, min(map(self._served, self._tenants)))
        else:
            self._forgive()
        tenant = self._away.pop(item.tenant, None) or _Tenant()
        tenant.weight = item.weight
        start = self._level - self._quantum
        tenant.charged = max(tenant.charged, start + self._outstanding(item.tenant) / item.weight)
        return tenant

    def _forgive(self) -> None:
        """Nobody waited: whoever has work here starts level."""
        for name, tenant in self._away.items():
            tenant.charged = self._level + self._outstanding(name) / tenant.weight

    def _lapse(self) -> None:
        """Whoever has to wait is no more behind than the least served of those that waited when it came."""
        for name, tenant in self._tenants.items():
            tenant.charged = max(tenant.charged, self._level + self._outstanding(name) / tenant.weight)

    def _leave(self, item: T, tenant: _Tenant[T]) -> None:
        tenant.cost -= item.cost
        if not len(tenant.queue):
            self._away[item.tenant] = self._tenants.pop(item.tenant)
            self._forget()

    def _forget(self) -> None:
        """Of those with nothing waiting and no work here, keep who stands worse than a newcomer, if anybody waits."""
        least = self._level - self._quantum if self._tenants else math.inf
        for name in [name for name in self._away if not self._outstanding(name) and self._served(name) <= least]:
            del self._away[name]
