"""Which bytes a node should hold when it cannot hold all."""

import pytest

from cluster.staging import choose_bytes
from registry.types import AdapterRecord, VersionRecord, VersionState
from tests.registry.uploads import sha


def version(number: int, *, num_bytes: int = 10, state: VersionState = VersionState.ACTIVE) -> VersionRecord:
    return VersionRecord(
        number=number,
        digest=sha(str(number)),
        state=state,
        created_at_s=float(number),
        num_bytes=num_bytes,
        max_rank=1,
        target_names=(),
    )


def adapter(*versions: VersionRecord, live: int | None = None, pending: tuple[int, ...] = ()) -> AdapterRecord:
    aliases = {} if live is None else {"live": live}
    waiting = tuple(sha(str(number)) for number in pending)
    return AdapterRecord(
        name="a", owner="o", revision=1, created_at_s=0, aliases=aliases, versions=versions, pending=waiting
    )


ADAPTERS = (
    adapter(version(1), version(4), version(9, state=VersionState.RETIRED), live=1),
    adapter(version(2), version(3, num_bytes=30), live=2),
    adapter(version(5), version(6)),
)


@pytest.mark.parametrize(
    ("max_bytes", "numbers"),
    [(5, []), (19, [2]), (29, [2, 1]), (45, [2, 1, 6, 5]), (1000, [2, 1, 6, 5, 4, 3])],
)
def test_alias_targets_come_first_and_the_newest_first(max_bytes: int, numbers: list[int]) -> None:
    assert choose_bytes(ADAPTERS, max_bytes) == [sha(str(number)) for number in numbers]


def test_what_an_activation_waits_for_is_always_chosen() -> None:
    waiting = adapter(version(7, num_bytes=40), version(8), pending=(7,))
    assert choose_bytes((*ADAPTERS, waiting), 45) == [sha("7")]
    assert choose_bytes((*ADAPTERS, waiting), 55) == [sha("7"), sha("2")]


def test_content_of_two_names_is_counted_once() -> None:
    assert choose_bytes((adapter(version(1), live=1), adapter(version(1))), 15) == [sha("1")]
