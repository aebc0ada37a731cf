"""At how many replicas each tenant has requests of this gateway. Knows nothing of placement or of limits."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class TenantSpread:
    """Counts requests by tenant and replica. Replicas share by weight among their tenants, each for itself: a tenant at
    two of them would get two shares, so a request tells how many there are."""

    def __init__(self) -> None:
        self._requests: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def __repr__(self) -> str:
        return f"TenantSpread({ {tenant: dict(replicas) for tenant, replicas in self._requests.items()} })"

    def __len__(self) -> int:
        """How many tenants have requests."""
        return len(self._requests)

    @contextmanager
    def at(self, tenant: str, replica_id: str) -> Iterator[int]:
        """Count a request of `tenant` at a replica while it lasts; gives the number of replicas, this one included."""
        replicas = self._requests[tenant]
        replicas[replica_id] += 1
        try:
            yield len(replicas)
        finally:
            replicas[replica_id] -= 1
            if not replicas[replica_id]:
                del replicas[replica_id]
            if not replicas:
                del self._requests[tenant]
