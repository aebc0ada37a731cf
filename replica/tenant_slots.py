"""Which adapters each tenant's admitted requests hold or wait for, against its limit. Knows counts, not slots."""

from collections import Counter

from replica.sequence import RequestGroup


class TenantSlots:
    """Counts the distinct adapters of a tenant's requests from admission to their end."""

    def __init__(self) -> None:
        self._held: dict[str, Counter[str]] = {}

    def __repr__(self) -> str:
        return f"TenantSlots({ {tenant: len(held) for tenant, held in self._held.items()} })"

    def __len__(self) -> int:
        """Tenants that hold any."""
        return len(self._held)

    def may_hold(self, group: RequestGroup) -> bool:
        """Whether its adapter is held already, or leaves its tenant within the limit that it came with."""
        most, held = group.request.max_slots, self._held.get(group.tenant)
        if most is None or held is None or group.adapter is None:
            return True
        return group.adapter in held or len(held) < most

    def hold(self, group: RequestGroup) -> None:
        if group.adapter is not None:
            self._held.setdefault(group.tenant, Counter())[group.adapter] += 1

    def release(self, group: RequestGroup) -> None:
        """The request has ended; every `hold` is followed by one."""
        if group.adapter is None:
            return
        held = self._held[group.tenant]
        held[group.adapter] -= 1
        if not held[group.adapter]:
            del held[group.adapter]
        if not held:
            del self._held[group.tenant]
