"""The later life of versions: canaries, drains, quarantine, replicas that fail, and the audit log."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from registry.audit import Head, check_chain, check_head, entry_hash
from registry.errors import AdapterNotFound, AuditBroken, Conflict, InvalidAdapter, ModelNotFound, RegistryError
from registry.service import Registry
from registry.types import ActivationState, Canary, Event, StagingState, VersionState
from tests.registry.two_replicas import TwoReplicas
from tests.registry.uploads import open_registry

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TwoReplicas]:
    setup = TwoReplicas(tmp_path)
    yield setup
    setup.registry.check_integrity()
    setup.registry.close()


# Canaries.


def test_canary_takes_nothing_before_every_replica_has_it(setup: TwoReplicas) -> None:
    setup.push(3)
    activation = setup.registry.canary("alice", 3, 1.0, actor="a")
    assert (activation.state, activation.weight) == (ActivationState.PENDING, 1.0)
    setup.report("r0")
    setup.registry.advance()
    setup.follow()
    assert setup.catalog.resolve("t", "alice").number == 1
    setup.settle()
    assert setup.registry.activation(activation.activation_id).state is ActivationState.DONE
    assert setup.registry.adapter("alice").canaries == {"live": Canary(number=3, weight=1.0)}
    assert setup.catalog.resolve("t", "alice").number == 3
    assert setup.catalog.resolve("t", "alice@1").number == 1


def test_promote_moves_the_alias_and_ends_the_canary(setup: TwoReplicas) -> None:
    setup.registry.canary("alice", 2, 0.5, actor="a")
    setup.settle()
    setup.registry.promote("alice", actor="a")
    setup.settle()
    record = setup.registry.adapter("alice")
    assert (record.aliases, record.canaries, record.previous) == ({"live": 2}, {}, {"live": 1})
    assert setup.registry.rollback("alice", "live", actor="a").number == 1


def test_halt_sends_everybody_back_at_once(setup: TwoReplicas) -> None:
    setup.registry.canary("alice", 2, 1.0, actor="a")
    setup.settle()
    assert setup.registry.halt("alice", actor="a").canaries == {}
    setup.follow()
    assert setup.catalog.resolve("t", "alice").number == 1
    with pytest.raises(Conflict, match="no canary"):
        setup.registry.halt("alice", actor="a")


def test_halt_calls_off_a_canary_that_is_still_staged(setup: TwoReplicas) -> None:
    activation = setup.registry.canary("alice", 2, 0.1, actor="a")
    setup.registry.halt("alice", actor="a")
    setup.settle()
    assert setup.registry.activation(activation.activation_id).state is ActivationState.SUPERSEDED
    assert setup.registry.adapter("alice").canaries == {}


def test_rollback_ends_the_canary_too(setup: TwoReplicas) -> None:
    setup.registry.activate("alice", "live", 2, actor="a")
    setup.settle()
    setup.push(3)
    setup.settle()
    setup.registry.canary("alice", 3, 0.5, actor="a")
    setup.settle()
    setup.registry.rollback("alice", "live", actor="a")
    setup.settle()
    record = setup.registry.adapter("alice")
    assert (record.aliases, record.canaries) == ({"live": 1}, {})


def test_canary_of_what_is_live_or_of_no_alias_is_refused(setup: TwoReplicas) -> None:
    with pytest.raises(Conflict, match="already"):
        setup.registry.canary("alice", 1, 0.1, actor="a")
    with pytest.raises(AdapterNotFound, match="no alias"):
        setup.registry.canary("alice", 2, 0.1, alias="beta", actor="a")
    with pytest.raises(AdapterNotFound, match="no version"):
        setup.registry.canary("alice", 9, 0.1, actor="a")
    for weight in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(InvalidAdapter, match="weight"):
            setup.registry.canary("alice", 2, weight, actor="a")


def test_every_operation_compares_and_sets(setup: TwoReplicas) -> None:
    old = setup.registry.adapter("alice").revision
    setup.registry.set_callers("alice", ["t"], actor="a")
    for operation in (
        lambda: setup.registry.canary("alice", 2, 0.1, actor="a", expected_revision=old),
        lambda: setup.registry.remove_alias("alice", "live", actor="a", expected_revision=old),
        lambda: setup.registry.halt("alice", actor="a", expected_revision=old),
    ):
        with pytest.raises(Conflict, match="revision"):
            operation()
    setup.registry.canary("alice", 2, 0.1, actor="a", expected_revision=setup.registry.adapter("alice").revision)


def test_two_registries_that_promote_and_halt_at_once_do_one_thing(setup: TwoReplicas) -> None:
    setup.registry.canary("alice", 2, 0.5, actor="a")
    setup.settle()
    revision = setup.registry.adapter("alice").revision
    other = open_registry(setup.folder / "data", setup.clock)
    done: list[str] = []

    def attempt(kind: str, registry: Registry) -> None:
        try:
            getattr(registry, kind)("alice", actor=kind, expected_revision=revision)
        except Conflict:
            return
        done.append(kind)

    pairs = [("promote", setup.registry), ("halt", other)] * 2
    threads = [threading.Thread(target=attempt, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1
    other.close()


def test_removed_alias_is_gone_with_what_waited_for_it(setup: TwoReplicas) -> None:
    activation = setup.registry.activate("alice", "beta", 2, actor="a")
    with pytest.raises(AdapterNotFound):
        setup.registry.remove_alias("alice", "beta", actor="a")
    setup.settle()
    again = setup.registry.activate("alice", "beta", 1, actor="a")
    assert setup.registry.remove_alias("alice", "beta", actor="a").aliases == {"live": 1}
    setup.settle()
    assert setup.registry.activation(activation.activation_id).state is ActivationState.DONE
    assert setup.registry.activation(again.activation_id).state is ActivationState.SUPERSEDED
    with pytest.raises(ModelNotFound):
        setup.catalog.resolve("t", "alice@beta")


# Drains.


def test_retired_version_refuses_new_requests_and_drains_what_runs(setup: TwoReplicas) -> None:
    record = setup.registry.retire("alice", 2, actor="a", deadline_s=30)
    version = record.version(2)
    assert version is not None
    assert (version.state, version.drain_until_s) == (VersionState.DRAINING, setup.clock.now_s + 30)
    setup.follow()
    with pytest.raises(ModelNotFound):
        setup.catalog.resolve("t", "alice@2")
    setup.clock.now_s += 5
    setup.report("r0", running=(version.digest,))
    setup.report("r1")
    setup.registry.advance()
    assert setup.state(2) is VersionState.DRAINING
    setup.report("r0")
    setup.registry.advance()
    assert setup.state(2) is VersionState.RETIRED


def test_drain_waits_for_gateways_that_have_not_heard(setup: TwoReplicas) -> None:
    setup.registry.retire("alice", 2, actor="a", deadline_s=30)
    setup.clock.now_s += 5
    for replica in ("r0", "r1"):
        setup.report(replica)
    setup.registry.advance()
    assert setup.state(2) is VersionState.DRAINING
    setup.follow()
    setup.registry.advance()
    assert setup.state(2) is VersionState.RETIRED


def test_deadline_ends_the_drain_whatever_runs(setup: TwoReplicas) -> None:
    digest = setup.digests[1]
    setup.registry.retire("alice", 2, actor="a", deadline_s=30)
    for seconds, state in ((29, VersionState.DRAINING), (1, VersionState.RETIRED)):
        setup.clock.now_s += seconds
        for replica in ("r0", "r1"):
            setup.report(replica, running=(digest,))
        setup.follow()
        setup.registry.advance()
        assert setup.state(2) is state


def test_later_retire_sets_another_deadline(setup: TwoReplicas) -> None:
    setup.registry.retire("alice", 2, actor="a", deadline_s=300)
    setup.registry.retire("alice", 2, actor="a", deadline_s=0)
    assert setup.state(2) is VersionState.RETIRED
    assert setup.kinds().count("version_retired") == 1


def test_draining_version_cannot_be_activated_but_comes_back_by_a_push(setup: TwoReplicas) -> None:
    setup.registry.retire("alice", 2, actor="a", deadline_s=300)
    with pytest.raises(Conflict, match="draining"):
        setup.registry.activate("alice", "live", 2, actor="a")
    assert setup.push(2) == 2
    assert setup.state(2) is VersionState.ACTIVE
    setup.clock.now_s += 301
    setup.registry.advance()
    assert setup.state(2) is VersionState.ACTIVE


def test_version_that_a_canary_uses_is_not_retired(setup: TwoReplicas) -> None:
    setup.registry.canary("alice", 2, 0.1, actor="a")
    setup.settle()
    with pytest.raises(Conflict, match="live"):
        setup.registry.retire("alice", 2, actor="a")


# Quarantine.


def test_quarantine_withdraws_the_content_under_every_name(setup: TwoReplicas) -> None:
    setup.push(2, name="bob", activate=True)
    setup.registry.canary("alice", 2, 1.0, actor="a")
    setup.settle()
    setup.registry.quarantine("alice", 2, actor="admin", reason="leaks")
    setup.follow()
    assert (setup.state(2), setup.state(1, "bob")) == (VersionState.QUARANTINED, VersionState.QUARANTINED)
    assert setup.catalog.resolve("t", "alice").number == 1
    assert setup.registry.adapter("alice").canaries == {}
    for model in ("alice@2", "bob", "bob@1"):
        with pytest.raises(ModelNotFound):
            setup.catalog.resolve("t", model)
    for name in ("alice", "bob", "carol"):
        with pytest.raises(Conflict, match="quarantined"):
            setup.push(2, name=name)


def test_quarantine_fails_what_waits_for_the_version(setup: TwoReplicas) -> None:
    activation = setup.registry.activate("alice", "live", 2, actor="a")
    setup.registry.quarantine("alice", 2, actor="admin", reason="leaks")
    ended = setup.registry.activation(activation.activation_id)
    assert ended.state is ActivationState.FAILED
    assert "quarantined" in (ended.error or "")


# Replicas that cannot stage.


def test_replica_that_cannot_stage_is_drained_when_the_others_can(tmp_path: Path) -> None:
    setup = TwoReplicas(tmp_path, on_staging_failure="drain")
    activation = setup.registry.activate("alice", "live", setup.push(3), actor="a")
    setup.report("r1", **{setup.digests[2]: "disk full"})
    setup.registry.advance()
    assert setup.registry.activation(activation.activation_id).state is ActivationState.PENDING
    setup.report("r0")
    setup.registry.advance()
    setup.follow()
    assert setup.registry.adapter("alice").aliases == {"live": 3}
    assert [replica.replica_id for replica in setup.catalog.replicas] == ["r0"]
    drained = {replica.replica_id: replica.drained for replica in setup.registry.replicas()}
    assert drained == {"r0": None, "r1": "it cannot stage alice@3: disk full"}
    setup.report("r1")
    setup.registry.advance()
    setup.follow()
    assert [replica.replica_id for replica in setup.catalog.replicas] == ["r0", "r1"]
    assert [kind for kind in setup.kinds() if kind.startswith("replica_")][-2:] == [
        "replica_drained",
        "replica_restored",
    ]
    setup.registry.close()


def test_version_that_no_replica_can_stage_drains_nobody(tmp_path: Path) -> None:
    setup = TwoReplicas(tmp_path, on_staging_failure="drain")
    activation = setup.registry.activate("alice", "live", 2, actor="a")
    for replica in ("r0", "r1"):
        setup.report(replica, **{setup.digests[1]: "broken"})
    setup.registry.advance()
    assert setup.registry.activation(activation.activation_id).state is ActivationState.FAILED
    assert all(replica.is_ready for replica in setup.registry.replicas())
    setup.registry.close()


def test_states_of_a_version_tell_each_replica(setup: TwoReplicas) -> None:
    digest = setup.digests[1]
    before = setup.registry.version_states("alice", 2)
    setup.report("r0", running=(digest,))
    setup.report("r1", **{digest: "disk full"})
    states = setup.registry.version_states("alice", 2)
    assert [(state.state, state.is_running, state.error) for state in states.replicas] == [
        (StagingState.HELD, True, None),
        (StagingState.FAILED, False, "disk full"),
    ]
    assert states.etag != before.etag
    assert setup.registry.version_states("alice", 2).etag == states.etag
    with pytest.raises(AdapterNotFound):
        setup.registry.version_states("alice", 7)


# The audit log.


def test_audit_log_is_the_change_log_in_a_chain(setup: TwoReplicas) -> None:
    setup.registry.quarantine("alice", 2, actor="ädmin", reason="leaks")
    page = setup.registry.audit(0, 1000)
    assert [entry.revision for entry in page.entries] == [event.revision for event in setup.registry.events(0, 1000)]
    head = check_chain(page.entries)
    check_head(head, Head(page.head_revision, page.head_hash))
    half = page.entries[len(page.entries) // 2]
    assert check_chain(setup.registry.audit(half.revision, 1000).entries, Head(half.revision, half.hash)) == head
    last = page.entries[-1]
    assert (last.kind, last.actor, last.digest) == ("version_quarantined", "ädmin", setup.digests[1])


@pytest.mark.parametrize("field", ["at_s", "kind", "name", "number", "digest", "actor", "detail"])
def test_entry_that_was_edited_is_found(setup: TwoReplicas, field: str) -> None:
    entries = list(setup.registry.audit(0, 1000).entries)
    values = {"at_s": 1.5, "number": 77, "detail": {"alias": "x"}, "digest": "f" * 64}
    entries[3] = entries[3].model_copy(update={field: values.get(field, "other")})
    with pytest.raises(AuditBroken, match="entry 4"):
        check_chain(entries)


def test_entries_that_were_removed_or_reordered_are_found(setup: TwoReplicas) -> None:
    page = setup.registry.audit(0, 1000)
    entries = list(page.entries)
    for broken in (entries[1:], [*entries[:2], *entries[3:]], [entries[1], entries[0], *entries[2:]]):
        with pytest.raises(AuditBroken):
            check_chain(broken)
    with pytest.raises(AuditBroken, match="should end"):
        check_head(check_chain(entries[:-1]), Head(page.head_revision, page.head_hash))


def test_entry_that_was_edited_with_its_own_hash_breaks_the_next_one(setup: TwoReplicas) -> None:
    entries = list(setup.registry.audit(0, 1000).entries)
    forged = entries[2].model_copy(update={"actor": "nobody"})
    entries[2] = forged.model_copy(update={"hash": entry_hash(forged.previous_hash, forged)})
    with pytest.raises(AuditBroken, match="entry 4"):
        check_chain(entries)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE events SET actor = 'somebody' WHERE revision = 2",
        "UPDATE events SET detail = '{}' WHERE kind = 'activation_requested'",
        "DELETE FROM events WHERE revision = (SELECT max(revision) FROM events)",
        "DELETE FROM events WHERE revision = 1",
        "UPDATE meta SET audit_hash = 'f'",
    ],
)
def test_row_that_was_changed_in_the_database_is_found(tmp_path: Path, change: str) -> None:
    setup = TwoReplicas(tmp_path)
    setup.registry.close()
    engine = create_engine(setup.registry._database._engine.url)
    with engine.begin() as connection:
        connection.execute(text(change))
    engine.dispose()
    registry = open_registry(tmp_path / "data", setup.clock)
    with pytest.raises(RegistryError, match="audit log"):
        registry.check_integrity()
    registry.close()


def test_hash_of_an_entry_never_changes() -> None:
    """Written down once: another program must be able to check the chain, and so must a later release."""
    fields = {"revision": 1, "at_s": 0.1, "kind": "k", "name": "ä", "number": 2, "digest": None, "actor": "x"}
    event = Event.model_validate({**fields, "detail": {"b": "1", "a": "2"}})
    plain = json.dumps({**event.model_dump(), "previous_hash": "0" * 64}, sort_keys=True, separators=(",", ":"))
    assert entry_hash("0" * 64, event) == hashlib.sha256(plain.encode()).hexdigest()
