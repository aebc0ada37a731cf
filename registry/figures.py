"""What the registry tells of itself as numbers: how far members are behind, activations, and how long they took."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from sqlalchemy import Column, Connection, case, func, select

from registry import records, tables
from registry.types import UNDER_WAY, ActivationState, Record, VersionState

State = TypeVar("State", bound=StrEnum)
a, r, g = tables.activations.c, tables.replicas.c, tables.gateways.c


class Propagation(Record):
    """Seconds from the request of an activation to the move of its alias, over all that came to it."""

    num_within: tuple[int, ...]
    """How many took at most as long as each of the bounds that were asked for."""
    count: int
    sum_s: float


class RegistryFigures(Record):
    """Counts of this moment. A lag is a number of changes that the member has not acted upon."""

    revision: int
    replica_lags: dict[str, int]
    replica_lags_s: dict[str, float]
    """How old the oldest of them is."""
    gateway_lags: dict[str, int]
    num_drained: int
    versions: dict[VersionState, int]
    activations: dict[ActivationState, int]
    oldest_open_s: float
    propagation: Propagation


def read(connection: Connection, bounds_s: Sequence[float], now_s: float) -> RegistryFigures:
    """All of one moment; `bounds_s` are those of the propagation times."""
    revision = records.revision(connection)
    replicas = connection.execute(select(r.replica_id, r.revision, r.drained).order_by(r.replica_id)).all()
    gateways = connection.execute(select(g.gateway_id, g.revision).order_by(g.gateway_id)).all()
    oldest_s = connection.execute(select(func.min(a.requested_at_s)).where(a.state.in_(UNDER_WAY))).scalar_one()
    v = tables.versions.c
    return RegistryFigures(
        revision=revision,
        replica_lags={row.replica_id: revision - row.revision for row in replicas},
        replica_lags_s={row.replica_id: _behind_s(connection, row.revision, now_s) for row in replicas},
        gateway_lags={row.gateway_id: revision - row.revision for row in gateways},
        num_drained=sum(row.drained is not None for row in replicas),
        versions=_counts(connection, v.state, VersionState),
        activations=_counts(connection, a.state, ActivationState),
        oldest_open_s=0.0 if oldest_s is None else max(0.0, now_s - oldest_s),
        propagation=_propagation(connection, bounds_s),
    )


def _behind_s(connection: Connection, revision: int, now_s: float) -> float:
    """The age of the first change after `revision`; 0 without one."""
    e = tables.events.c
    at_s = connection.execute(select(e.at_s).where(e.revision > revision).order_by(e.revision).limit(1)).scalar()
    return 0.0 if at_s is None else max(0.0, now_s - at_s)


def _counts(connection: Connection, column: Column[str], states: type[State]) -> dict[State, int]:
    """How many rows are in each state."""
    rows = connection.execute(select(column, func.count()).group_by(column))
    found = {str(value): int(count) for value, count in rows}
    return {state: found.get(state.value, 0) for state in states}


def _propagation(connection: Connection, bounds_s: Sequence[float]) -> Propagation:
    """One pass over the activations that moved their alias."""
    took_s = a.staged_after_s
    within = [func.coalesce(func.sum(case((took_s <= bound, 1), else_=0)), 0) for bound in bounds_s]
    query = select(func.count(), func.coalesce(func.sum(took_s), 0.0), *within).where(took_s.is_not(None))
    count, sum_s, *num_within = connection.execute(query).one()
    return Propagation(num_within=tuple(num_within), count=count, sum_s=sum_s)
