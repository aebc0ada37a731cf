"""The series that belong to one adapter or tenant: made as they are needed, gone together. Knows no names."""

from typing import Any

from telemetry.series import Family, S


class Owned:
    """Makes series of its owner. After `close` they are gone for good, and changes count for nothing."""

    def __init__(self) -> None:
        self._made: dict[tuple[Family[Any], tuple[str, ...]], Any] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"Owned({len(self._made)} series, closed={self._closed})"

    def of(self, family: Family[S], *values: str) -> S:
        """The owner's series with these values."""
        if self._closed:
            return family.loose()
        made: S | None = self._made.get((family, values))
        if made is None:
            made = self._made[family, values] = family.labels(*values)
        return made

    def close(self) -> None:
        """Drop all of them."""
        self._closed = True
        for family, values in self._made:
            family.remove(*values)
        self._made.clear()
