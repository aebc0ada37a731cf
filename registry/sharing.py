"""How several gateways share a tenant's limits: each holds a part, and the parts never add up to more than the limit.

A gateway lowers its part by itself and then says so; the registry only ever hands out what nobody holds. So an answer
that is lost or late makes the sum smaller, never larger. Messages are numbered, since one that is overtaken would take
back what the later one said. Parts live in the gateways' leases and end with them.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import select, update

from registry import tables, tenants
from registry.database import Transaction
from registry.types import LimitShare, LimitUse, TenantLimits

SHARED_LIMITS = ("max_concurrent", "requests_per_minute", "tokens_per_minute")
"""Limits that all gateways of the fleet share."""

IDLE_SHARE = 8
"""A gateway that nobody asks for a tenant keeps this fraction of an equal part, so that it can begin at once."""

g = tables.gateways.c
Parts = dict[str, int]
"""`tenant/limit` -> units."""


def split(limit: int, wanted: Sequence[int]) -> list[int]:
    """Whole parts of `limit`, max-min fair by what is wanted; what nobody wants is spread evenly.

    The parts add up to `limit` exactly.
    """
    parts = [0] * len(wanted)
    left, waiting = limit, sorted(range(len(wanted)), key=lambda i: wanted[i])
    for place, i in enumerate(waiting):
        fair = left // (len(waiting) - place)
        parts[i] = min(wanted[i], fair)
        left -= parts[i]
    eager = sorted(range(len(wanted)), key=lambda i: -wanted[i])
    for place, i in enumerate(eager):
        extra = -(-left // (len(eager) - place))
        parts[i] += extra
        left -= extra
    return parts


def share(
    tx: Transaction, gateway_id: str, number: int, uses: Sequence[LimitUse], defaults: TenantLimits
) -> tuple[LimitShare, ...] | None:
    """Note what a gateway holds and wants, and give it what it may have: an answer for each of `uses`, and one for
    each part that it holds while another gateway goes short. None when its lease is gone.

    `number` grows with every message of a gateway; one that comes again, or after a later one, says nothing new."""
    rows = tx.connection.execute(select(g.gateway_id, g.held, g.wanted, g.share_number).order_by(g.gateway_id)).all()
    if any(row.gateway_id == gateway_id and row.share_number >= number for row in rows):
        return ()
    held: dict[str, Parts] = {row.gateway_id: dict(row.held) for row in rows}
    wanted: dict[str, Parts] = {row.gateway_id: dict(row.wanted) for row in rows}
    if gateway_id not in held:
        return None
    limits = _limits(tx, defaults, {use.tenant for use in uses} | {_tenant(part) for part in held[gateway_id]})
    for use in uses:
        held[gateway_id][_part(use.tenant, use.limit)] = use.held
        wanted[gateway_id][_part(use.tenant, use.limit)] = use.wanted
    asked = {_part(use.tenant, use.limit) for use in uses}
    shares = []
    for part in sorted(asked | set(held[gateway_id])):
        limit = limits.get(part)
        if limit is None:
            held[gateway_id].pop(part, None)
            wanted[gateway_id].pop(part, None)
            continue
        target = _target(part, limit, gateway_id, wanted)
        if part in asked:
            held[gateway_id][part] = _grant(part, limit, gateway_id, held, target)
        if part in asked or held[gateway_id][part] > target:
            tenant, _, name = part.rpartition("/")
            shares.append(LimitShare(tenant=tenant, limit=name, granted=held[gateway_id][part], target=target))
    values = {"held": held[gateway_id], "wanted": wanted[gateway_id], "share_number": number}
    tx.connection.execute(update(tables.gateways).where(g.gateway_id == gateway_id).values(**values))
    return tuple(shares)


def _limits(tx: Transaction, defaults: TenantLimits, names: set[str]) -> Parts:
    """The shared limits in force of these tenants."""
    found = tenants.own_limits(tx.connection, names)
    limits: Parts = {}
    for name in names:
        for limit, value in found.get(name, TenantLimits()).over(defaults):
            if limit in SHARED_LIMITS and value is not None:
                limits[_part(name, limit)] = value
    return limits


def _target(part: str, limit: int, gateway_id: str, wanted: Mapping[str, Parts]) -> int:
    ids = list(wanted)
    least = limit // (IDLE_SHARE * len(ids))
    parts = split(limit, [max(least, wanted[each].get(part, 0)) for each in ids])
    return parts[ids.index(gateway_id)]


def _grant(part: str, limit: int, gateway_id: str, held: Mapping[str, Parts], target: int) -> int:
    """What it holds, and more up to its target as far as nobody else holds it."""
    mine = held[gateway_id][part]
    others = sum(parts.get(part, 0) for each, parts in held.items() if each != gateway_id)
    return mine + max(0, min(target - mine, limit - others - mine))


def _part(tenant: str, limit: str) -> str:
    return f"{tenant}/{limit}"


def _tenant(part: str) -> str:
    return part.rpartition("/")[0]
