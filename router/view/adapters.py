"""The table of adapters: the busiest first, searched by name or owner."""

from collections.abc import Iterable, Mapping

from registry.types import LIVE_ALIAS, AdapterRecord
from router.view.records import AdapterRow, AdapterTable
from router.view.traffic import Traffic, total


def adapter_rows(
    adapters: Iterable[AdapterRecord], base_label: str, num_slots: Mapping[str, int], traffic: Traffic
) -> list[AdapterRow]:
    """A row for the base, and one for every adapter that can be called or is being served; the busiest first."""
    rows = [_row(base_label, None, traffic, 0)] if base_label in traffic.keys else []
    rows += [
        _row(record.name, record, traffic, num_slots.get(record.name, 0))
        for record in adapters
        if record.aliases or record.name in traffic.keys or record.name in num_slots
    ]
    return sorted(rows, key=lambda row: (-row.tokens_per_s, -row.requests_per_s, -row.in_flight, -row.requests, row))


def _row(name: str, record: AdapterRecord | None, traffic: Traffic, num_slots: int) -> AdapterRow:
    keys = traffic.keys.get(name, ())
    first_p50, first_p99 = traffic.first_token.quantiles(keys)
    p50, p99 = traffic.latency.quantiles(keys)
    return AdapterRow(
        name=name,
        owner=None if record is None else record.owner,
        live=None if record is None else record.aliases.get(LIVE_ALIAS),
        num_versions=0 if record is None else len(record.versions),
        num_slots=num_slots,
        in_flight=int(total(traffic.in_flight, keys)),
        requests=total(traffic.requests, keys),
        requests_per_s=_rounded(total(traffic.requests_per_s, keys)),
        failures_per_s=_rounded(traffic.failures_per_s(keys)),
        tokens=total(traffic.tokens, keys),
        tokens_per_s=_rounded(total(traffic.tokens_per_s, keys)),
        first_token_p50_s=_short(first_p50),
        first_token_p99_s=_short(first_p99),
        latency_p50_s=_short(p50),
        latency_p99_s=_short(p99),
    )


def adapter_table(rows: list[AdapterRow], limit: int, search: str) -> AdapterTable:
    """At most `limit` rows whose name or owner has `search` in it."""
    wanted = search.casefold()
    found = [row for row in rows if wanted in row.name.casefold() or wanted in (row.owner or "").casefold()]
    return AdapterTable(num_total=len(rows), num_matching=len(found), rows=tuple(found[:limit]))


def _rounded(rate: float) -> float:
    return round(rate, 2)


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
