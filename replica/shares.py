"""What each tenant holds of a step loop's rows and KV blocks against its share. Knows counts, moves nothing.

A tenant's share is its weight's part among the tenants that have sequences here. Shares are soft: what one leaves,
others may have, until it is claimed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

from replica.sequence import RequestGroup, Sequence, State


def divide(budget: int, wants: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Parts of `budget` by weight, none larger than what is wanted; what one leaves goes to the others (max-min).

    All of the budget is given as long as somebody wants more; a remainder goes to those named first.
    """
    parts: dict[str, int] = {}
    open_wants = dict(wants)
    while open_wants:
        total = sum(weights[name] for name in open_wants)
        fair = {name: budget * weights[name] / total for name in open_wants}
        content = [name for name, want in open_wants.items() if want <= fair[name]]
        if not content:
            return parts | _whole(budget, fair)
        for name in content:
            parts[name] = open_wants.pop(name)
            budget -= parts[name]
    return parts


def _whole(budget: int, fair: Mapping[str, float]) -> dict[str, int]:
    parts = {name: int(part) for name, part in fair.items()}
    rest = budget - sum(parts.values())
    for name in list(parts)[:rest]:
        parts[name] += 1
    return parts


class Shares:
    """A snapshot of who holds what; `joining` counts as a tenant here although it holds nothing yet.

    Without `by_tenant` all sequences belong to one owner, who has a claim on nobody.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence],
        *,
        num_rows: int,
        num_blocks: float,
        by_tenant: bool,
        joining: RequestGroup | None = None,
    ) -> None:
        self._sequences = list(sequences)
        self._num_rows, self._num_blocks, self._by_tenant = num_rows, num_blocks, by_tenant
        groups = [sequence.group for sequence in self._sequences] + ([] if joining is None else [joining])
        self.weights: dict[str, float] = {self.owner(group): group.weight for group in groups}
        self._total_weight = sum(self.weights.values())

    def owner(self, group: RequestGroup) -> str:
        """Whose share `group` takes from."""
        return group.tenant if self._by_tenant else ""

    def owner_of(self, sequence: Sequence) -> str:
        return self.owner(sequence.group)

    def may_have_row(self, owner: str) -> bool:
        """Whether one more row leaves `owner` within its share; a tenant with none may always have one."""
        return self._rows[owner] + 1 <= max(1.0, self._part(owner) * self._num_rows)

    def has_row_to_spare(self, owner: str) -> bool:
        return self._rows[owner] > max(1.0, self._part(owner) * self._num_rows)

    def may_have_blocks(self, owner: str, num_blocks: int) -> bool:
        """Whether `num_blocks` more leave `owner` within its share."""
        return len(self._blocks[owner]) + num_blocks <= self._part(owner) * self._num_blocks

    def row_excess(self, owner: str) -> float:
        """Rows for each unit of weight, to compare owners by."""
        return self._rows[owner] / self.weights[owner]

    def block_excess(self, owner: str) -> float:
        return len(self._blocks[owner]) / self.weights[owner]

    def _part(self, owner: str) -> float:
        return self.weights[owner] / self._total_weight

    @cached_property
    def _rows(self) -> Counter[str]:
        running = (each for each in self._sequences if each.state is State.RUNNING and not each.is_full)
        return Counter(map(self.owner_of, running))

    @cached_property
    def _blocks(self) -> defaultdict[str, set[int]]:
        """A block that several of an owner's sequences share counts once."""
        held: defaultdict[str, set[int]] = defaultdict(set)
        for sequence in self._sequences:
            held[self.owner_of(sequence)].update(sequence.blocks)
        return held
