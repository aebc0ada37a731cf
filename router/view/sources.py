"""What the view is made of, gathered at one moment: metrics, slots, replicas, the catalog, the change log."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from registry.catalog import Catalog
from registry.errors import RegistryError
from registry.types import AdapterRecord, Event, ReplicaRecord
from replica.messages import SlotView
from router.view.scrape import Reading, read

NUM_EVENTS = 40
MAX_NEW_EVENTS = 200

Result = TypeVar("Result")


class LogReader(Protocol):
    """What the view asks of the registry; both may raise RegistryError subclasses."""

    async def replicas(self) -> Sequence[ReplicaRecord]: ...

    async def events(self, after: int, limit: int, wait_s: float = 0.0) -> Sequence[Event]: ...


class ViewSource(Protocol):
    """What the view asks of the gateway."""

    @property
    def catalog(self) -> Catalog: ...
    @property
    def registry(self) -> LogReader: ...
    def missing(self) -> list[str]: ...
    def wall_s(self) -> float: ...
    async def expositions(self) -> Mapping[str, bytes]: ...
    async def slots(self) -> Mapping[str, Sequence[SlotView]]: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything at one moment."""

    wall_s: float
    readings: Mapping[str, Reading]
    slots: Mapping[str, Sequence[SlotView]]
    replicas: Sequence[ReplicaRecord]
    adapters: Sequence[AdapterRecord]
    events: Sequence[Event]
    revision: int
    base: str | None
    missing: tuple[str, ...]
    registry_answers: bool
    cost_s: float
    """Processor time of reading the texts."""


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the processor seconds that this thread spent on it."""
    began_s = time.thread_time()
    return work(), time.thread_time() - began_s


class Gatherer:
    """Asks everybody at once. Keeps the last events, so that only new ones are fetched."""

    def __init__(self, source: ViewSource) -> None:
        self._source = source
        self._events: deque[Event] = deque(maxlen=NUM_EVENTS)

    async def gather(self) -> Moment:
        """Members that do not answer are left out; without the registry the catalog speaks for it."""
        source = self._source
        texts, slots, told = await asyncio.gather(source.expositions(), source.slots(), self._ask_registry())
        readings, cost_s = await asyncio.to_thread(timed, lambda: {name: read(text) for name, text in texts.items()})
        catalog = source.catalog
        return Moment(
            wall_s=source.wall_s(),
            readings=readings,
            slots=slots,
            replicas=catalog.replicas if told is None else told,
            adapters=catalog.adapters,
            events=tuple(self._events),
            revision=catalog.revision,
            base=next(iter(catalog.base_names), None) if catalog.base is not None else None,
            missing=tuple(source.missing()),
            registry_answers=told is not None,
            cost_s=cost_s,
        )

    async def _ask_registry(self) -> Sequence[ReplicaRecord] | None:
        newest = self._events[-1].revision if self._events else 0
        after = max(newest, self._source.catalog.revision - NUM_EVENTS)
        try:
            registry = self._source.registry
            replicas, events = await asyncio.gather(registry.replicas(), registry.events(after, MAX_NEW_EVENTS))
        except RegistryError:
            return None
        self._events.extend(event for event in events if event.revision > newest)
        return replicas
