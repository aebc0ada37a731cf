"""The registry's rules, one by one: versions, aliases, activations, members, the change log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.catalog import Catalog
from registry.config import RegistryConfig
from registry.errors import (
    AdapterNotFound,
    Conflict,
    InvalidAdapter,
    JoinRefused,
    NotReady,
    RegistryError,
)
from registry.service import Registry
from registry.types import ActivationState, VersionState
from tests.registry.uploads import (
    Clock,
    make_base,
    make_config,
    make_tensors,
    open_registry,
    paths_of,
    plain_upload,
    sha,
    write_upload,
)

pytestmark = pytest.mark.usefixtures("backend")
BASE = make_base()


class Setup:
    """A registry with a base, and short ways to do the usual things."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.registry = open_registry(folder / "data", self.clock, retire_deadline_s=0)
        self.registry.publish_base(BASE, actor="replica")

    def push(self, name: str = "alice", seed: int = 0, activate: bool = True, owner: str = "owner") -> str:
        """Push content number `seed`; returns its digest."""
        files = plain_upload(self.folder / f"upload-{seed}", BASE, seed)
        return self.registry.push(name, files, owner=owner, activate=activate).version.digest

    def join(self, replica_id: str, *staged: str) -> int:
        record = self.registry.join_replica(
            replica_id=replica_id, node_id="node", num_slots=4, base_digest=BASE.digest, staged=staged
        )
        if staged:
            self.stage(replica_id, *staged)
        return record.ring_id

    def stage(self, replica_id: str, *staged: str, **failed: str) -> None:
        """Report bytes on the node of `replica_id`, which has seen everything."""
        record = self.registry.renew_replica(
            replica_id, revision=self.revision(), staged=staged, held=staged, failed=failed
        )
        assert record is not None

    def revision(self) -> int:
        """Of the newest change."""
        delta = self.registry.changes(0)
        return 0 if delta is None else delta.revision

    def ring(self) -> dict[str, int]:
        return {replica.replica_id: replica.ring_id for replica in self.registry.replicas()}

    def live(self, name: str = "alice", alias: str = "live") -> int | None:
        return self.registry.adapter(name).aliases.get(alias)

    def state(self, activation_id: int) -> ActivationState:
        return self.registry.activation(activation_id).state


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path)
    yield setup
    setup.registry.check_integrity()
    setup.registry.close()


def test_push_before_a_base_is_known_is_not_ready(tmp_path: Path) -> None:
    registry = open_registry(tmp_path / "data")
    with pytest.raises(NotReady):
        registry.push("alice", plain_upload(tmp_path / "u", BASE), owner="o")
    registry.close()


def test_push_of_new_content_gets_the_next_number(setup: Setup) -> None:
    for seed in range(3):
        files = plain_upload(setup.folder / str(seed), BASE, seed)
        result = setup.registry.push("alice", files, owner="o", activate=False)
        assert (result.version.number, result.created, result.activation) == (seed + 1, True, None)


def test_push_of_known_content_keeps_its_number_and_activates(setup: Setup) -> None:
    first = setup.push(seed=0)
    setup.push(seed=1)
    result = setup.registry.push("alice", plain_upload(setup.folder / "again", BASE, 0), owner="owner")
    assert (result.version.number, result.created, result.version.digest) == (1, False, first)
    assert result.activation is not None
    assert result.activation.number == 1


def test_push_of_known_content_without_activation_changes_nothing(setup: Setup) -> None:
    setup.push(activate=False)
    before = setup.registry.changes(0)
    setup.push(activate=False)
    assert setup.registry.changes(0) == before


def test_same_content_under_two_names_shares_digest_and_blob(setup: Setup) -> None:
    assert setup.push("alice") == setup.push("bob")
    assert len([path for path in (setup.folder / "data/blobs").rglob("*") if path.is_file()]) == 1
    assert [record.name for record in setup.registry.adapters()] == ["alice", "bob"]


def test_same_content_in_another_file_stores_no_second_blob(setup: Setup) -> None:
    tensors = make_tensors(BASE, paths_of(BASE, "q_proj"))
    config = make_config(target_modules=["q_proj"])
    one = setup.registry.push("a", write_upload(setup.folder / "1", config, tensors), owner="o")
    back = write_upload(setup.folder / "2", config, dict(reversed(tensors.items())))
    other = setup.registry.push("b", back, owner="o")
    assert one.version == other.version.model_copy(update={"number": 1})
    assert len([path for path in (setup.folder / "data/blobs").rglob("*") if path.is_file()]) == 1


def test_lost_blob_is_healed_by_the_next_push(setup: Setup) -> None:
    digest = setup.push()
    blob = setup.registry.manifest(digest).blob_sha256
    (setup.folder / "data/blobs" / blob[:2] / blob).unlink()
    with pytest.raises(RegistryError, match="missing"):
        setup.registry.check_integrity()
    setup.push("bob")
    assert setup.registry.blobs.exists(setup.registry.manifest(digest).blob_sha256)


def test_name_of_another_owner_is_taken(setup: Setup) -> None:
    setup.push(owner="first")
    with pytest.raises(Conflict, match="taken"):
        setup.push(owner="second", seed=1)


@pytest.mark.parametrize("name", ["", "a/b", "ü", "x" * 65, "-a", "a..b", "a\n", "../x"])
def test_bad_name_is_refused(setup: Setup, name: str) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        setup.push(name)
    assert caught.value.faults[0].code == "name"


def test_name_of_the_base_is_taken(tmp_path: Path) -> None:
    registry = open_registry(tmp_path / "data")
    registry.publish_base(make_base("tiny"), actor="r")
    with pytest.raises(Conflict, match="base model"):
        registry.push("tiny", plain_upload(tmp_path / "u", BASE), owner="o")
    registry.close()


def test_refused_upload_leaves_nothing_behind(setup: Setup) -> None:
    before = setup.registry.changes(0)
    with pytest.raises(InvalidAdapter):
        setup.registry.push("alice", plain_upload(setup.folder / "bad", BASE, use_dora=True), owner="o")
    assert setup.registry.changes(0) == before
    assert not [path for path in (setup.folder / "data/blobs").rglob("*") if path.is_file()]


def test_alias_moves_when_every_live_replica_has_staged(setup: Setup) -> None:
    setup.join("r1")
    setup.join("r2")
    digest = setup.push()
    assert not setup.registry.advance()
    setup.stage("r1", digest)
    assert not setup.registry.advance()
    assert (setup.live(), setup.registry.activation(1).waiting_for) == (None, ("r2",))
    setup.clock.now_s += 2
    setup.stage("r2", digest)
    assert setup.registry.advance()
    assert (setup.live(), setup.state(1)) == (1, ActivationState.DONE)
    assert setup.registry.activation(1).staged_after_s == 2.0
    assert not setup.registry.advance()


def test_alias_does_not_move_without_a_replica(setup: Setup) -> None:
    setup.push()
    assert not setup.registry.advance()
    assert setup.live() is None


def test_activation_waits_for_gateways_and_forgets_dead_ones(setup: Setup) -> None:
    setup.registry.renew_gateway("g1", 1)
    setup.registry.renew_gateway("g2", 1)
    digest = setup.push()
    setup.join("r1", digest)
    setup.registry.advance()
    activation = setup.registry.activation(1)
    assert (activation.state, activation.waiting_for) == (ActivationState.FLIPPED, ("g1", "g2"))
    assert activation.flipped_revision is not None
    setup.clock.now_s += 9
    setup.registry.renew_gateway("g1", activation.flipped_revision)
    setup.stage("r1", digest)
    setup.registry.advance()
    assert setup.registry.activation(1).waiting_for == ("g2",)
    setup.clock.now_s += 2
    setup.registry.advance()
    assert setup.state(1) is ActivationState.DONE


def test_gateway_that_leaves_is_not_waited_for(setup: Setup) -> None:
    setup.registry.renew_gateway("g1", 0)
    setup.join("r1", setup.push(activate=False))
    setup.registry.activate("alice", "live", 1, actor="a")
    setup.registry.advance()
    assert setup.state(1) is ActivationState.FLIPPED
    setup.registry.leave_gateway("g1")
    setup.registry.advance()
    assert setup.state(1) is ActivationState.DONE


def test_replica_that_cannot_stage_fails_the_activation(setup: Setup) -> None:
    setup.join("r1")
    digest = setup.push()
    assert setup.registry.renew_replica("r1", revision=setup.revision(), staged=[], failed={digest: "disk full"})
    assert setup.registry.advance()
    activation = setup.registry.activation(1)
    assert activation.state is ActivationState.FAILED
    assert activation.error == "replica r1 cannot stage it: disk full"
    assert setup.registry.adapter("alice").pending == ()


def test_bytes_on_demand_do_not_carry_an_activation_that_the_replica_has_not_seen(setup: Setup) -> None:
    digest = setup.push(activate=False)
    setup.join("r1")
    setup.registry.renew_replica("r1", revision=setup.revision(), staged=[digest], held=[])
    setup.registry.activate("alice", "live", 1, actor="a")
    assert not setup.registry.advance()
    assert setup.registry.activation(1).waiting_for == ("r1",)
    setup.stage("r1", digest)
    assert setup.registry.advance()
    assert setup.live() == 1


def test_bytes_on_the_node_carry_an_activation_at_once(setup: Setup) -> None:
    digest = setup.push(activate=False)
    setup.join("r1")
    renewed = setup.registry.renew_replica("r1", revision=setup.revision(), staged=[digest], held=[digest])
    assert renewed is not None
    assert (renewed.staged, renewed.held) == ((digest,), (digest,))
    setup.registry.activate("alice", "live", 1, actor="a")
    assert setup.registry.advance()
    assert setup.live() == 1
    assert setup.registry.replicas()[0].held == (digest,)


def test_failed_staging_can_be_tried_again(setup: Setup) -> None:
    setup.join("r1")
    digest = setup.push()
    setup.registry.renew_replica("r1", revision=setup.revision(), staged=[], failed={digest: "disk full"})
    setup.registry.advance()
    setup.registry.activate("alice", "live", 1, actor="a")
    assert not setup.registry.advance(), "the report is older than the request"
    assert setup.state(2) is ActivationState.PENDING
    setup.registry.renew_replica("r1", revision=setup.revision(), staged=[], failed={digest: "still full"})
    setup.registry.advance()
    assert setup.registry.activation(2).error == "replica r1 cannot stage it: still full"
    setup.registry.activate("alice", "live", 1, actor="a")
    setup.stage("r1", digest)
    setup.registry.advance()
    assert (setup.state(3), setup.live()) == (ActivationState.DONE, 1)


def test_activation_that_nobody_carries_out_times_out(setup: Setup) -> None:
    setup.push()
    setup.clock.now_s += 301
    assert setup.registry.advance()
    assert setup.state(1) is ActivationState.FAILED
    assert "a replica" in (setup.registry.activation(1).error or "")


def test_newer_activation_supersedes_the_older_of_the_same_alias(setup: Setup) -> None:
    setup.push(seed=0)
    second = setup.push(seed=1)
    setup.registry.activate("alice", "canary", 1, actor="a")
    assert [setup.state(i) for i in (1, 2, 3)] == [
        ActivationState.SUPERSEDED,
        ActivationState.PENDING,
        ActivationState.PENDING,
    ]
    first = setup.registry.adapter("alice").versions[0].digest
    setup.join("r1", first, second)
    setup.registry.advance()
    assert setup.registry.adapter("alice").aliases == {"live": 2, "canary": 1}


def test_activation_of_what_does_not_exist_is_not_found(setup: Setup) -> None:
    setup.push()
    for call in (
        lambda: setup.registry.activate("nobody", "live", 1, actor="a"),
        lambda: setup.registry.activate("alice", "live", 9, actor="a"),
        lambda: setup.registry.rollback("alice", "live", actor="a"),
        lambda: setup.registry.activation(99),
        lambda: setup.registry.manifest(sha("x")),
        lambda: setup.registry.retire("alice", 9, actor="a"),
        lambda: setup.registry.retire("nobody", None, actor="a"),
        lambda: setup.registry.adapter("x" * 10_000),
    ):
        with pytest.raises(AdapterNotFound):
            call()


@pytest.mark.parametrize("alias", ["", "1", "Live", "a b", "-x", "x" * 33, "live\n", "1st"])
def test_bad_alias_is_refused(setup: Setup, alias: str) -> None:
    setup.push()
    with pytest.raises(InvalidAdapter) as caught:
        setup.registry.activate("alice", alias, 1, actor="a")
    assert caught.value.faults[0].code == "alias_name"


def test_activation_loses_when_the_adapter_has_changed(setup: Setup) -> None:
    setup.push(activate=False)
    seen = setup.registry.adapter("alice").revision
    setup.push(seed=1, activate=False)
    with pytest.raises(Conflict, match="revision"):
        setup.registry.activate("alice", "live", 1, actor="a", expected_revision=seen)
    now = setup.registry.adapter("alice").revision
    assert setup.registry.activate("alice", "live", 1, actor="a", expected_revision=now).number == 1


def test_rollback_goes_to_the_previous_target(setup: Setup) -> None:
    setup.join("r1")
    staged = []
    for seed in range(3):
        staged.append(setup.push(seed=seed))
        setup.stage("r1", *staged)
        setup.registry.advance()
    assert setup.live() == 3
    assert setup.registry.rollback("alice", "live", actor="a").number == 2
    setup.registry.advance()
    assert setup.live() == 2
    assert setup.registry.rollback("alice", "live", actor="a").number == 3
    setup.registry.advance()
    setup.registry.retire("alice", 2, actor="a")
    assert setup.registry.rollback("alice", "live", actor="a").number == 1


def test_rollback_without_an_earlier_target_is_a_conflict(setup: Setup) -> None:
    setup.join("r1", setup.push())
    setup.registry.advance()
    with pytest.raises(Conflict, match="no earlier"):
        setup.registry.rollback("alice", "live", actor="a")


def test_version_with_an_alias_cannot_be_retired(setup: Setup) -> None:
    setup.join("r1", setup.push())
    setup.registry.advance()
    with pytest.raises(Conflict, match="live"):
        setup.registry.retire("alice", 1, actor="a")


def test_retiring_a_version_fails_what_waits_for_it(setup: Setup) -> None:
    setup.push()
    record = setup.registry.retire("alice", 1, actor="a")
    assert record.versions[0].state is VersionState.RETIRED
    assert setup.state(1) is ActivationState.FAILED
    with pytest.raises(Conflict, match="retired"):
        setup.registry.activate("alice", "live", 1, actor="a")


def test_retiring_an_adapter_removes_its_aliases(setup: Setup) -> None:
    digest = setup.push()
    setup.join("r1", digest)
    setup.registry.advance()
    record = setup.registry.retire("alice", None, actor="a")
    assert (record.aliases, record.versions[0].state) == ({}, VersionState.RETIRED)
    revision = record.revision
    assert setup.registry.retire("alice", None, actor="a").revision == revision
    assert setup.join("r2") == 1


def test_retired_content_comes_back_by_push(setup: Setup) -> None:
    setup.push()
    setup.registry.retire("alice", None, actor="a")
    result = setup.registry.push("alice", plain_upload(setup.folder / "again", BASE), owner="owner")
    assert (result.version.number, result.created, result.version.state) == (1, False, VersionState.ACTIVE)
    setup.join("r1", result.version.digest)
    setup.registry.advance()
    assert setup.live() == 1


def test_quarantined_content_stays_out(setup: Setup) -> None:
    digest = setup.push()
    setup.join("r1", digest)
    setup.registry.advance()
    record = setup.registry.quarantine("alice", 1, actor="a", reason="leaks")
    assert (record.aliases, record.versions[0].state) == ({"live": 1}, VersionState.QUARANTINED)
    assert setup.join("r2") == 1
    with pytest.raises(Conflict, match="quarantined"):
        setup.push()


def test_callers_can_be_named(setup: Setup) -> None:
    setup.push()
    record = setup.registry.set_callers("alice", ["bob"], actor="a")
    assert record.callers == ("bob",)
    assert setup.registry.set_callers("alice", ["bob"], actor="a").revision == record.revision


def test_joiner_must_hold_what_is_live_or_pending(setup: Setup) -> None:
    live = setup.push(seed=0)
    setup.join("r1", live)
    setup.registry.advance()
    pending = setup.push(seed=1)
    idle = setup.push(seed=2, activate=False)
    with pytest.raises(JoinRefused) as caught:
        setup.join("r2", idle)
    assert caught.value.missing == tuple(sorted([live, pending]))
    assert live[:12] in caught.value.message
    assert setup.join("r2", live, pending) == 1


def test_joiner_with_another_base_is_refused(setup: Setup) -> None:
    with pytest.raises(JoinRefused, match="holds the base") as caught:
        setup.registry.join_replica(replica_id="r", node_id="n", num_slots=1, base_digest=sha("x"), staged=[])
    assert caught.value.missing == ()


def test_joiner_before_a_base_is_published_is_refused(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    with pytest.raises(JoinRefused, match="publish"):
        registry.join_replica(replica_id="r", node_id="n", num_slots=1, base_digest=BASE.digest, staged=[])
    registry.close()


def test_ring_id_is_the_lowest_free_ordinal(setup: Setup) -> None:
    assert [setup.join(name) for name in ("a", "b", "c")] == [0, 1, 2]
    setup.registry.leave_replica("b")
    assert setup.join("c") == 2
    assert setup.join("d") == 1
    assert setup.join("e") == 3
    assert [
        record.replica_id for record in (setup.registry.changes(0) or pytest.fail("nothing there")).replicas
    ] == list("adce")


def test_lease_expires_when_it_is_not_renewed(setup: Setup) -> None:
    setup.join("a")
    setup.join("b")
    setup.clock.now_s += 9
    setup.stage("a")
    assert not setup.registry.advance()
    setup.clock.now_s += 2
    assert setup.registry.advance()
    assert setup.registry.renew_replica("b", revision=1, staged=[]) is None
    assert setup.join("b") == 1


def test_replacement_that_joined_early_gets_the_place_of_the_dead(setup: Setup) -> None:
    for name in ("a", "b", "c"):
        setup.join(name)
    setup.clock.now_s += 5
    for name in ("a", "c"):
        setup.stage(name)
    assert setup.join("reborn") == 3
    setup.clock.now_s += 6
    for name in ("a", "c", "reborn"):
        setup.stage(name)
    before = setup.revision()
    assert setup.registry.advance()
    assert setup.ring() == {"a": 0, "reborn": 1, "c": 2}
    expired, renumbered = setup.registry.events(before)
    assert (expired.kind, expired.actor) == ("replica_expired", "b")
    assert (renumbered.kind, renumbered.actor) == ("replica_renumbered", "reborn")
    assert renumbered.detail == {"before": "3", "ring_id": "1"}
    assert setup.join("late") == 3


def test_several_replacements_fill_the_places_of_the_dead(setup: Setup) -> None:
    for name in ("a", "b", "c"):
        setup.join(name)
    setup.clock.now_s += 6
    for name in ("x", "y", "z"):
        setup.join(name)
    setup.stage("c")
    setup.clock.now_s += 6
    setup.registry.advance()
    assert sorted(setup.ring().values()) == [0, 1, 2, 3]
    assert setup.ring()["c"] == 2


def test_nobody_moves_for_a_replica_that_left_or_was_older(setup: Setup) -> None:
    for name in ("a", "b"):
        setup.join(name)
    setup.clock.now_s += 1
    setup.stage("a")
    setup.clock.now_s += 8
    setup.stage("b")
    setup.join("b")
    setup.clock.now_s += 3
    assert setup.registry.advance()
    assert setup.ring() == {"b": 1}, "it was there while a lived"
    assert setup.join("c") == 0
    setup.clock.now_s += 1
    assert setup.join("d") == 2
    setup.registry.leave_replica("c")
    assert not setup.registry.advance()
    assert setup.ring() == {"b": 1, "d": 2}


def test_late_renewal_before_the_lease_is_taken_away_keeps_it(setup: Setup) -> None:
    setup.join("a")
    setup.clock.now_s += 60
    setup.stage("a")
    assert not setup.registry.advance()


def test_lease_survives_an_outage_of_the_registry(setup: Setup) -> None:
    setup.join("a")
    setup.join("b")
    setup.clock.now_s += 60
    restarted = open_registry(setup.folder / "data", setup.clock)
    assert not restarted.advance()
    assert restarted.renew_replica("b", revision=1, staged=[]) is not None
    setup.clock.now_s += 10
    assert restarted.advance()
    assert [record.ring_id for record in (restarted.changes(0) or pytest.fail("nothing there")).replicas] == [1]
    restarted.close()


def test_renewal_takes_no_revision(setup: Setup) -> None:
    setup.join("a")
    before = setup.registry.changes(0)
    assert before is not None
    setup.stage("a", sha("x"))
    setup.registry.renew_gateway("g", 1)
    assert setup.registry.changes(before.revision) is None


def test_base_can_be_published_again(setup: Setup) -> None:
    revision = setup.registry.publish_base(BASE, actor="r2")
    assert revision == setup.registry.publish_base(BASE, actor="r3") == 1
    template = BASE.model_copy(update={"chat_template": "{{ messages }}"})
    assert setup.registry.publish_base(template, actor="r3") == 2
    assert setup.registry.base() == template


def test_other_base_is_a_conflict_while_the_old_one_is_in_use(setup: Setup) -> None:
    other = make_base(weights="other")
    setup.join("r1")
    with pytest.raises(Conflict, match="replicas"):
        setup.registry.publish_base(other, actor="r")
    setup.registry.leave_replica("r1")
    setup.push()
    with pytest.raises(Conflict, match="versions"):
        setup.registry.publish_base(other, actor="r")
    setup.registry.retire("alice", None, actor="a")
    setup.registry.publish_base(other, actor="r")
    assert setup.registry.base() == other


def test_changes_are_told_once_and_whole(setup: Setup) -> None:
    setup.push("alice")
    first = setup.registry.changes(0)
    assert first is not None
    assert first.full
    assert setup.registry.changes(first.revision) is None
    setup.push("bob", seed=1)
    second = setup.registry.changes(first.revision)
    assert second is not None
    assert (second.full, [record.name for record in second.adapters]) == (False, ["bob"])
    future = setup.registry.changes(second.revision + 5)
    assert future is not None
    assert future.full
    assert len(future.adapters) == 2


def test_events_come_in_order_and_in_pages(setup: Setup) -> None:
    setup.push()
    setup.join("r1", setup.push(seed=1))
    setup.registry.advance()
    events = setup.registry.events(0)
    assert [event.revision for event in events] == list(range(1, len(events) + 1))
    assert [event.kind for event in events] == [
        "base_published",
        "version_pushed",
        "activation_requested",
        "version_pushed",
        "activation_requested",
        "replica_joined",
        "alias_moved",
    ]
    assert setup.registry.events(2, limit=2) == events[2:4]
    assert setup.registry.events(2, limit=-1) == ()


def test_everything_survives_a_restart(setup: Setup) -> None:
    digest = setup.push()
    setup.join("r1", digest)
    setup.registry.close()
    setup.registry = open_registry(setup.folder / "data", setup.clock)
    setup.registry.advance()
    catalog = Catalog([])
    catalog.apply(setup.registry.changes(0) or pytest.fail("nothing there"))
    assert catalog.resolve("t", "alice").digest == digest


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_database_in_memory_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="in-memory"):
        RegistryConfig(database_url=url)


def test_registry_can_be_seen(setup: Setup) -> None:
    assert "Pool" in repr(setup.registry)
    assert "blobs" in repr(setup.registry)
    assert isinstance(setup.registry, Registry)
