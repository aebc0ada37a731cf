"""Pins and preloads in the registry: kept, bounded by slots, told to those who follow, and in the audit log."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from registry import tables
from registry.errors import AdapterNotFound, Conflict
from registry.types import LEAST_PRELOAD_S, Preload
from tests.registry.two_replicas import TwoReplicas
from tests.registry.uploads import open_registry

NUM_SLOTS = 4


@pytest.fixture
def setup(tmp_path: Path, backend: str) -> Iterator[TwoReplicas]:
    setup = TwoReplicas(tmp_path)
    yield setup
    setup.registry.close()


def test_pin_and_preload_reach_the_catalog_and_survive_a_restart(setup: TwoReplicas) -> None:
    registry = setup.registry
    revision = setup.revision()
    assert registry.pin("alice", actor="a").pinned is True
    assert registry.set_preload("alice", Preload(at="07:30"), actor="a").preload == Preload(at="07:30")
    setup.follow()
    (known,) = setup.catalog.adapters
    assert (known.pinned, known.preload) == (True, Preload(at="07:30"))
    registry.close()
    reopened = open_registry(setup.folder / "data", setup.clock)
    assert reopened.adapter("alice") == known
    assert reopened.unpin("alice", actor="a").pinned is False
    assert reopened.set_preload("alice", None, actor="a").preload is None
    kinds = [event.kind for event in reopened.events(revision, 100)]
    assert kinds == ["adapter_pinned", "preload_changed", "adapter_unpinned", "preload_changed"]
    reopened.check_integrity()
    reopened.close()


def test_what_is_so_already_is_no_change(setup: TwoReplicas) -> None:
    setup.registry.pin("alice", actor="a")
    setup.registry.set_preload("alice", Preload(every_s=60), actor="a")
    revision = setup.revision()
    setup.registry.pin("alice", actor="a")
    setup.registry.set_preload("alice", Preload(every_s=60), actor="a")
    assert setup.revision() == revision


def test_each_replica_keeps_a_slot_for_the_others(setup: TwoReplicas) -> None:
    for number in range(NUM_SLOTS):
        setup.push(10 + number, name=f"tenant-{number}")
    for number in range(NUM_SLOTS - 1):
        setup.registry.pin(f"tenant-{number}", actor="a")
    with pytest.raises(Conflict, match=r"3 adapters are, and replica r0 has 4 slots, of which one must stay free"):
        setup.registry.pin("tenant-3", actor="a")
    setup.registry.unpin("tenant-0", actor="a")
    assert setup.registry.pin("tenant-3", actor="a").pinned


def test_retiring_an_adapter_ends_its_pin_and_its_preload(setup: TwoReplicas) -> None:
    setup.push(10, name="bob")
    for name in ("alice", "bob"):
        setup.registry.pin(name, actor="a")
        setup.registry.set_preload(name, Preload(at="07:30"), actor="a")
    revision = setup.revision()
    record = setup.registry.retire("alice", None, actor="a", deadline_s=0)
    assert (record.pinned, record.preload) == (False, None)
    events = setup.registry.events(revision, 100)
    assert [event.kind for event in events if event.name == "alice"][-2:] == ["adapter_unpinned", "preload_changed"]
    assert {event.actor for event in events} == {"a"}
    setup.follow()
    known = {adapter.name: (adapter.pinned, adapter.preload) for adapter in setup.catalog.adapters}
    assert known["bob"] == (True, Preload(at="07:30"))
    assert known.get("alice", (False, None)) == (False, None)
    revision = setup.revision()
    setup.registry.retire("alice", None, actor="a", deadline_s=0)
    assert setup.revision() == revision
    setup.push(1)
    assert setup.registry.adapter("alice").pinned is False
    for number in range(NUM_SLOTS - 2):
        setup.push(20 + number, name=f"tenant-{number}")
        setup.registry.pin(f"tenant-{number}", actor="a")
    setup.registry.check_integrity()


def test_interval_that_was_stored_when_shorter_ones_were_allowed_is_the_least_one_now(setup: TwoReplicas) -> None:
    with setup.registry._database.write() as tx:
        tx.connection.execute(update(tables.adapters).values(preload={"every_s": 1.0}))
    assert setup.registry.adapter("alice").preload == Preload(every_s=LEAST_PRELOAD_S)


def test_unknown_adapter_is_refused(setup: TwoReplicas) -> None:
    for change in (setup.registry.pin, setup.registry.unpin):
        with pytest.raises(AdapterNotFound):
            change("nobody", actor="a")
    with pytest.raises(AdapterNotFound):
        setup.registry.set_preload("nobody", None, actor="a")


@pytest.mark.parametrize(
    "wrong", [{}, {"every_s": 60, "at": "07:30"}, {"every_s": 59.9}, {"at": "24:00"}, {"at": "7:30"}]
)
def test_schedule_is_one_of_two_and_in_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"every_s|at"):
        Preload.model_validate(wrong)
