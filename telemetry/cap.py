"""Which adapters, and which tenants, have series of their own, so that no number of them makes a scrape too large."""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

OTHER = "_other"
"""The label of all that have no series of their own; no adapter and no tenant can have this name."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Capped(Generic[K, V]):
    """A value each for up to `limit` keys, made when a key is first asked for; later keys share the value of `other`
    until others have gone."""

    def __init__(self, limit: int, make: Callable[[K], V], other: K) -> None:
        self._limit = limit
        self._make = make
        self._other = other
        self._own: dict[K, V] = {}
        self._shared: V | None = None

    def __repr__(self) -> str:
        return f"Capped({len(self._own)} of {self._limit})"

    def __iter__(self) -> Iterator[tuple[K, V]]:
        """What there is of its own, as it is now; any thread may ask."""
        return iter(tuple(self._own.items()))

    def of(self, key: K) -> V:
        """The value of a key; it keeps it until it is dropped."""
        found = self._own.get(key)
        if found is not None:
            return found
        if len(self._own) < self._limit:
            value = self._own[key] = self._make(key)
            return value
        if self._shared is None:
            self._shared = self._make(self._other)
        return self._shared

    def drop(self, key: K) -> V | None:
        """Forget a key and return its value; None when it has none of its own."""
        return self._own.pop(key, None)
