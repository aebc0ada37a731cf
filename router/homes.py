"""Which replicas are an adapter's homes: the bounded working set, and more homes for adapters in demand. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.preferences import Member, Row


@dataclass(frozen=True, slots=True)
class Demand:
    """What the fleet is asked for. `active` are the names in use, None for all; a name that `num_homes` leaves out
    has one home."""

    active: frozenset[str] | None = None
    num_homes: Mapping[str, int] = field(default_factory=dict)


SLACK = 1.5
"""Standard deviations of a free draw that a member may have above its share while its slots hold them."""


def rooms(num_homes: int, members: Sequence[Member], home_factor: float) -> list[int]:
    """How many of `num_homes` homes each member may have: `home_factor` above its share by weight, rounded up.

    Where its slots hold more than that, as many as most members would get by preference alone: the bound is there to
    keep adapters in slots, and each that it turns away moves again when others come into use or fall asleep.
    """
    whole = math.fsum(member.weight for member in members)
    shares = [num_homes * (member.weight / whole) for member in members]
    return [
        max(math.ceil(home_factor * share), min(member.num_slots, math.ceil(share + SLACK * math.sqrt(share))))
        for member, share in zip(members, shares, strict=True)
    ]


def assign(
    rows: Mapping[str, Row], names: Sequence[str], members: Sequence[Member], demand: Demand, home_factor: float
) -> dict[str, Row]:
    """Indices of each name's homes, its first home first. `names` come in the order that every gateway shares.

    Adapters in use choose first, under a bound that counts only them; so sleepers move nobody. Then the sleepers, under
    the bound over all. More homes for those in demand come last, by preference among replicas whose first homes are
    below the bound: they move no other adapter, and more of them keep those that there were.
    """
    counts = [0] * len(members)
    active = [name for name in names if demand.active is None or name in demand.active]
    sleepers = [] if demand.active is None else [name for name in names if name not in demand.active]
    homes: dict[str, Row] = {}
    for group, num in ((active, len(active)), (sleepers, len(names))):
        room = rooms(num, members, home_factor)
        for name in group:
            first = next(index for index in rows[name] if counts[index] < room[index])
            counts[first] += 1
            homes[name] = (first,)
    room = rooms(len(active), members, home_factor)
    for name in active:
        num_more = min(demand.num_homes.get(name, 1), len(members)) - 1
        if num_more > 0:
            others = [index for index in rows[name] if index not in homes[name]]
            others.sort(key=lambda index: counts[index] >= room[index])
            homes[name] += tuple(others[:num_more])
    return homes
