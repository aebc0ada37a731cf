"""Which adapters, and which tenants, have series of their own, so that no number of them makes a scrape too large."""

from collections.abc import Hashable
from typing import Generic, TypeVar

OTHER = "_other"
"""The label of all that have no series of their own; no adapter and no tenant can have this name."""

K = TypeVar("K", bound=Hashable)


class Cap(Generic[K]):
    """Admits up to `limit` keys; what comes later shares one bucket until others have gone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: set[K] = set()

    def __repr__(self) -> str:
        return f"Cap({len(self._keys)} of {self._limit})"

    def admits(self, key: K) -> bool:
        """Whether `key` has series of its own; it keeps its place until it is dropped."""
        if key in self._keys:
            return True
        if len(self._keys) >= self._limit:
            return False
        self._keys.add(key)
        return True

    def drop(self, key: K) -> None:
        """Give the place of a key free; one without a place is left alone."""
        self._keys.discard(key)
