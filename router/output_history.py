"""How long a tenant's answers usually are: what a request is charged that does not say how long its answer may be."""

from collections import OrderedDict, deque
from collections.abc import Iterable

NUM_REMEMBERED = 128
MIN_SEEN = 8
MAX_TENANTS = 4096
SHARE = 0.95


class OutputHistory:
    """The latest answers of each tenant, in tokens; the tenants heard of longest ago are forgotten first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, deque[int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"OutputHistory({len(self._seen)} tenants)"

    def note(self, tenant: str, lengths: Iterable[int]) -> None:
        """Remember answers that came to their end."""
        self._seen.setdefault(tenant, deque(maxlen=NUM_REMEMBERED)).extend(lengths)
        self._seen.move_to_end(tenant)
        if len(self._seen) > MAX_TENANTS:
            self._seen.popitem(last=False)

    def expected(self, tenant: str) -> int | None:
        """The length that 95 of 100 answers did not exceed; None while too few were seen."""
        lengths = sorted(self._seen.get(tenant, ()))
        return lengths[int(SHARE * (len(lengths) - 1))] if len(lengths) >= MIN_SEEN else None
