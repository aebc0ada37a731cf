"""The map of the fleet: every replica with its slots, who sits in them, and how busy they are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from registry.types import ReplicaRecord
from replica.messages import SlotView
from router.view import figures
from router.view.figures import Figure, Key
from router.view.records import ReplicaView, SlotRow
from router.view.window import Window
from telemetry.catalogue import DIGEST_LABEL_LENGTH

Names = Mapping[str, Key]
"""The first digits of a digest -> the adapter's name and the version's number, as metrics say them."""


def replica_views(
    records: Iterable[ReplicaRecord], slots: Mapping[str, Sequence[SlotView]], names: Names, window: Window, newest: int
) -> tuple[ReplicaView, ...]:
    """In the order of the ring. `newest` is the catalog's revision."""
    return tuple(
        _view(record, slots.get(record.replica_id), names, window, newest)
        for record in sorted(records, key=lambda record: record.ring_id)
    )


def _view(
    record: ReplicaRecord, slots: Sequence[SlotView] | None, names: Names, window: Window, newest: int
) -> ReplicaView:
    name = record.replica_id

    def now(figure: Figure) -> float:
        return window.value(figure, name)

    used, free = now(figures.KV_USED), now(figures.KV_FREE)
    return ReplicaView(
        replica_id=name,
        ring_id=record.ring_id,
        node_id=record.node_id,
        answers=window.has(name),
        drained=record.drained,
        behind=max(0, newest - record.revision),
        num_slots=record.num_slots,
        slots=_slot_rows(record, slots, names, window),
        num_staged=len(record.staged),
        num_host_cached=int(window.values(figures.HELD, name).get(("host",), 0)),
        running=int(now(figures.RUNNING)),
        waiting=int(now(figures.WAITING)),
        loading=int(now(figures.LOADING)),
        kv_used=round(used / (used + free), 4) if used + free else None,
        tokens=now(figures.GENERATED),
        tokens_per_s=window.rate(figures.GENERATED, name),
        swaps=now(figures.SWAPS),
        swaps_per_s=window.rate(figures.SWAPS, name),
        hits=now(figures.HITS),
        misses=now(figures.MISSES),
        hit_rate=hit_rate(window, name),
    )


def _slot_rows(
    record: ReplicaRecord, slots: Sequence[SlotView] | None, names: Names, window: Window
) -> tuple[SlotRow, ...]:
    """What the replica says of its slots; while it does not answer, what it last reported to be resident."""
    if slots is None:
        slots = [SlotView("resident", digest) for digest in record.resident]
    starts = window.rates(figures.STARTS, record.replica_id)
    return tuple(_slot_row(slot, names, starts) for slot in slots)


def _slot_row(slot: SlotView, names: Names, starts: Mapping[Key, float]) -> SlotRow:
    if slot.digest is None:
        return SlotRow(slot.use, None, None, 0, 0.0)
    label = slot.digest[:DIGEST_LABEL_LENGTH]
    key = names.get(label, (label, ""))
    return SlotRow(slot.use, key[0], int(key[1]) if key[1] else None, slot.num_pins, round(starts.get(key, 0.0), 2))


def hit_rate(window: Window, replica_id: str | None = None) -> float | None:
    """Slot hits over look-ups within the window; None without look-ups."""
    hits, misses = window.rate(figures.HITS, replica_id), window.rate(figures.MISSES, replica_id)
    return hits / (hits + misses) if hits + misses else None


def slots_by_adapter(views: Iterable[ReplicaView]) -> Counter[str]:
    return Counter(slot.adapter for view in views for slot in view.slots if slot.adapter is not None)
