"""Collects everything that is wrong with an upload, so that its author hears of all of it at once."""

from collections import Counter

from registry.errors import InvalidAdapter
from registry.types import Fault

MAX_PER_CODE = 8


def shown(value: object, max_chars: int = 80) -> str:
    """`value` as it may stand in a message: quoted, one line, cut to `max_chars`."""
    text = repr(value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


class FaultList:
    """Faults and warnings in the order found; of each code only the first few are kept, with a count of the rest."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._warnings: list[Fault] = []
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"FaultList(faults={sum(self._counts.values())}, warnings={len(self._warnings)})"

    @property
    def codes(self) -> frozenset[str]:
        return frozenset(self._counts)

    def add(self, code: str, message: str, *, hint: str | None = None, field: str | None = None) -> None:
        self._counts[code] += 1
        if self._counts[code] <= MAX_PER_CODE:
            self._faults.append(Fault(code=code, message=message, hint=hint, field=field))

    def warn(self, code: str, message: str, *, hint: str | None = None, field: str | None = None) -> None:
        self._warnings.append(Fault(code=code, message=message, hint=hint, field=field))

    def faults(self) -> tuple[Fault, ...]:
        more = {code: count - MAX_PER_CODE for code, count in self._counts.items() if count > MAX_PER_CODE}
        return (
            *self._faults,
            *(Fault(code=code, message=f"and {count} more of the kind {code}") for code, count in more.items()),
        )

    def warnings(self) -> tuple[Fault, ...]:
        return tuple(self._warnings)

    def raise_if_any(self) -> None:
        """Raise InvalidAdapter with every fault, if there is one."""
        if self._counts:
            raise InvalidAdapter(self.faults())
