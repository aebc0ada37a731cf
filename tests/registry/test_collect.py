"""What the collector removes, and what it must not touch: what anything holds, what may be in use, what is young."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from registry.types import CollectAction, CollectReport, VersionState
from tests.registry.two_replicas import BASE, TwoReplicas
from tests.registry.uploads import open_registry, plain_upload

pytestmark = pytest.mark.usefixtures("backend")

DAY_S = 24 * 3600.0
RULES = {"keep_versions": 2, "min_age_s": DAY_S, "unused_s": DAY_S, "grace_s": 3600.0}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TwoReplicas]:
    """Versions 1 to 5, of which 1 is live; all of them are two days old."""
    setup = TwoReplicas(tmp_path, retention=RULES, lease_ttl_s=1e9)
    for seed in (3, 4, 5):
        setup.push(seed)
    setup.settle()
    later(setup, 2 * DAY_S)
    yield setup
    setup.registry.check_integrity()
    setup.registry.close()


def later(setup: TwoReplicas, seconds: float) -> None:
    setup.clock.now_s += seconds
    setup.settle()


def retire(setup: TwoReplicas) -> None:
    """Retire version 2, and let everybody hear of it."""
    setup.registry.retire("alice", 2, actor="a", deadline_s=0)
    setup.settle()


def collect(setup: TwoReplicas, dry_run: bool = False) -> dict[int, CollectAction]:
    return actions(setup.registry.collect(actor="a", dry_run=dry_run))


def actions(report: CollectReport) -> dict[int, CollectAction]:
    return {item.number: item.action for item in report.items if item.number is not None}


def blobs(setup: TwoReplicas) -> int:
    return len(list(setup.registry.blobs.list()))


def test_versions_beyond_the_count_go_in_two_steps(setup: TwoReplicas) -> None:
    assert collect(setup) == {1: CollectAction.KEEP, 2: CollectAction.RETIRE, 3: CollectAction.RETIRE}
    assert setup.state(2) is VersionState.DRAINING
    later(setup, 100)
    assert setup.state(2) is VersionState.RETIRED
    assert collect(setup) == dict.fromkeys((1, 2, 3), CollectAction.KEEP), "the grace period has only begun"
    later(setup, 3601)
    assert collect(setup)[2] is CollectAction.COLLECT
    assert (setup.state(2), setup.state(3), setup.state(4)) == (
        VersionState.COLLECTED,
        VersionState.COLLECTED,
        VersionState.ACTIVE,
    )


def test_the_collector_gives_running_requests_the_deadline_of_the_configuration(tmp_path: Path) -> None:
    setup = TwoReplicas(tmp_path, retention=RULES, lease_ttl_s=1e9, retire_deadline_s=500)
    for seed in (3, 4, 5):
        setup.push(seed)
    setup.settle()
    later(setup, 2 * DAY_S)
    in_use = setup.digests[1]
    assert collect(setup)[2] is CollectAction.RETIRE
    setup.report("r0", running=(in_use,))
    setup.clock.now_s += 499
    setup.report("r0", running=(in_use,))
    setup.registry.advance()
    assert setup.state(2) is VersionState.DRAINING
    setup.clock.now_s += 2
    setup.report("r0", running=(in_use,))
    setup.registry.advance()
    assert setup.state(2) is VersionState.RETIRED
    setup.registry.close()


def test_dry_run_tells_the_same_and_changes_nothing(setup: TwoReplicas) -> None:
    before = (setup.revision(), setup.registry.adapters(), blobs(setup))
    planned = setup.registry.collect(actor="a", dry_run=True)
    assert planned.dry_run
    assert (setup.revision(), setup.registry.adapters(), blobs(setup)) == before
    assert actions(planned) == collect(setup)
    (kept,) = [item for item in planned.items if item.action is CollectAction.KEEP]
    assert kept.why == "beyond the newest 2, 2 d old, never used; held by alias live"


def test_bytes_of_a_collected_version_are_swept_and_its_number_stays_taken(setup: TwoReplicas) -> None:
    retire(setup)
    later(setup, 3601)
    before = blobs(setup)
    digest = setup.digests[1]
    sha256 = setup.registry.manifest(digest).blob_sha256
    make_old(setup)
    report = setup.registry.collect(actor="a")
    assert report.freed_bytes == setup.registry.manifest(digest).blob_bytes
    assert blobs(setup) == before - 1
    assert not setup.registry.blobs.exists(sha256)
    files = plain_upload(setup.folder / "again", BASE, 2)
    again = setup.registry.push("alice", files, owner="o", activate=False)
    assert (again.created, again.version.number, again.version.state) == (False, 2, VersionState.ACTIVE)
    assert setup.registry.blobs.exists(sha256)
    assert setup.push(6) == 6


HOLD: dict[str, Callable[[TwoReplicas], object]] = {
    "alias live": lambda setup: setup.registry.activate("alice", "live", 2, actor="a"),
    "the canary of live": lambda setup: setup.registry.canary("alice", 2, 0.1, actor="a"),
    "the way back of live": lambda setup: (
        setup.registry.activate("alice", "live", 2, actor="a"),
        setup.settle(),
        setup.registry.activate("alice", "live", 5, actor="a"),
    ),
}


@pytest.mark.parametrize("holder", HOLD)
def test_version_that_something_holds_stays(setup: TwoReplicas, holder: str) -> None:
    HOLD[holder](setup)
    setup.settle()
    report = setup.registry.collect(actor="a")
    (item,) = [item for item in report.items if item.number == 2]
    assert item.action is CollectAction.KEEP
    assert holder in item.why
    assert setup.state(2) is VersionState.ACTIVE


def test_version_that_an_activation_waits_for_stays(setup: TwoReplicas) -> None:
    setup.registry.activate("alice", "beta", 2, actor="a")
    report = setup.registry.collect(actor="a")
    assert [item.why for item in report.items if item.number == 2] == [
        "beyond the newest 2, 2 d old, never used; held by a pending activation"
    ]


def test_version_that_runs_on_a_replica_stays(setup: TwoReplicas) -> None:
    setup.report("r1", running=(setup.digests[1],))
    assert collect(setup)[2] is CollectAction.KEEP


def test_retired_version_stays_while_a_gateway_may_still_use_it(setup: TwoReplicas) -> None:
    setup.registry.retire("alice", 2, actor="a", deadline_s=0)
    for _ in range(3):
        setup.clock.now_s += 3601
        for replica in ("r0", "r1"):
            setup.report(replica)
        setup.registry.advance()
        report = setup.registry.collect(actor="a")
        assert [item.why for item in report.items if item.number == 2] == [
            "retired, 2 d old, never used; held by a gateway or replica that has not seen its end"
        ]
    setup.settle()
    assert collect(setup)[2] is CollectAction.KEEP, "the grace period begins when the last gateway has acknowledged"
    later(setup, 3601)
    assert collect(setup)[2] is CollectAction.COLLECT


def test_use_keeps_a_version_young(setup: TwoReplicas) -> None:
    setup.registry.renew_gateway("g", setup.catalog.revision, [setup.digests[1]])
    assert collect(setup, dry_run=True) == {1: CollectAction.KEEP, 3: CollectAction.RETIRE}
    later(setup, 2 * DAY_S)
    assert collect(setup, dry_run=True)[2] is CollectAction.RETIRE


def test_without_a_count_only_what_was_retired_goes(tmp_path: Path) -> None:
    setup = TwoReplicas(tmp_path, retention={**RULES, "keep_versions": None}, lease_ttl_s=1e9)
    later(setup, 2 * DAY_S)
    assert collect(setup) == {}
    retire(setup)
    later(setup, 3601)
    assert collect(setup) == {2: CollectAction.COLLECT}
    setup.registry.close()


def test_content_that_another_name_serves_keeps_its_bytes(setup: TwoReplicas) -> None:
    setup.push(2, name="bob", activate=True)
    retire(setup)
    later(setup, 2 * DAY_S)
    make_old(setup)
    assert collect(setup)[2] is CollectAction.COLLECT
    assert setup.registry.blobs.exists(setup.registry.manifest(setup.digests[1]).blob_sha256)


def test_blob_without_a_row_is_swept_after_the_grace_period(setup: TwoReplicas) -> None:
    young = setup.registry.blobs.put_bytes(b"young")
    (setup.folder / "data" / "blobs" / young[:2] / young).touch()
    now_s = (setup.folder / "data" / "blobs" / young[:2] / young).stat().st_mtime
    setup.clock.now_s = now_s + 3500
    assert not [item for item in setup.registry.collect(actor="a").items if item.action is CollectAction.SWEEP]
    setup.clock.now_s = now_s + 3700
    setup.registry.advance()
    swept = [item for item in setup.registry.collect(actor="a").items if item.action is CollectAction.SWEEP]
    assert [item.blob_sha256 for item in swept] == [young]
    assert not setup.registry.blobs.exists(young)


def test_uploads_and_collectors_at_once_lose_no_bytes(setup: TwoReplicas) -> None:
    """Content comes and goes in one thread while two registries collect: what is acknowledged has its bytes."""
    other = open_registry(
        setup.folder / "data", setup.clock, retention={"min_age_s": 0, "unused_s": 0, "grace_s": 0}, lease_ttl_s=1e9
    )
    for replica in ("r0", "r1"):
        setup.registry.leave_replica(replica)
    setup.registry.leave_gateway("g")
    make_old(setup)
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            other.collect(actor="b")

    threads = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(25):
            number = setup.push(2)
            version = setup.registry.adapter("alice").version(number)
            assert version is not None
            assert version.state is VersionState.ACTIVE
            assert setup.registry.blobs.exists(setup.registry.manifest(version.digest).blob_sha256), turn
            setup.registry.retire("alice", number, actor="a", deadline_s=0)
            setup.registry.advance()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    other.close()


def make_old(setup: TwoReplicas) -> None:
    """Time in tests is not the file system's: put every blob before it."""
    for path in (setup.folder / "data" / "blobs").rglob("*"):
        if path.is_file():
            os.utime(path, (1.0, 1.0))
