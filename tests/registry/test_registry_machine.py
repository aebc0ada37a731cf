"""Random histories of one registry against a plain model: what aliases may do, and what followers see."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from registry.catalog import Catalog
from registry.draining import LINGER_S
from registry.errors import AdapterNotFound, Conflict, JoinRefused, RegistryError
from registry.types import Activation, ActivationState, Canary, CollectAction, VersionState
from tests.registry.uploads import Clock, make_base, open_registry, plain_upload

BASE = make_base()
NAMES = ("alice", "bob")
ALIASES = ("live", "canary")
SEEDS = range(4)
REPLICAS = ("r0", "r1", "r2")
TTL_S, TIMEOUT_S, GRACE_S = 10.0, 60.0, 5.0
ACTIVE = VersionState.ACTIVE
Key = tuple[str, str]
"""A name and a digest, or a name and an alias."""

names, aliases, replicas = st.sampled_from(NAMES), st.sampled_from(ALIASES), st.sampled_from(REPLICAS)


@dataclass
class Wish:
    """An activation of the model."""

    activation_id: int
    name: str
    alias: str
    digest: str
    requested_at_s: float
    requested_revision: int
    weight: float | None = None
    state: ActivationState = ActivationState.PENDING


@dataclass
class Member:
    """A replica of the model."""

    ring_id: int
    joined_at_s: float
    renewed_at_s: float
    staged: frozenset[str]
    failed: frozenset[str] = frozenset()
    revision: int = 0
    held: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()

    def has_staged(self, wish: Wish) -> bool:
        seen = self.revision >= wish.requested_revision
        return wish.digest in self.staged and (seen or wish.digest in self.held)


@dataclass
class Closed:
    """What the model knows of a version that is out of service."""

    revision: int
    at_s: float
    until_s: float | None = None
    quiet_at_s: float | None = None


@dataclass
class Model:
    """What the registry should hold, kept in the plainest way."""

    versions: dict[str, list[str]] = field(default_factory=dict)
    states: dict[Key, VersionState] = field(default_factory=dict)
    closed: dict[Key, Closed] = field(default_factory=dict)
    aliases: dict[Key, str] = field(default_factory=dict)
    previous: dict[Key, str] = field(default_factory=dict)
    canaries: dict[Key, tuple[str, float]] = field(default_factory=dict)
    history: dict[Key, list[str]] = field(default_factory=dict)
    wishes: list[Wish] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)

    def pending(self) -> list[Wish]:
        return [wish for wish in self.wishes if wish.state is ActivationState.PENDING]

    def wish(self, wish: Wish) -> None:
        self.supersede(wish.name, wish.alias)
        self.wishes.append(wish)

    def supersede(self, name: str, alias: str) -> None:
        for older in self.pending():
            if (older.name, older.alias) == (name, alias):
                older.state = ActivationState.SUPERSEDED

    def required(self) -> set[str]:
        pairs = [(name, digest) for (name, _), digest in self.aliases.items()]
        pairs += [(name, digest) for (name, _), (digest, _) in self.canaries.items()]
        wanted = {digest for name, digest in pairs if self.states[name, digest] is ACTIVE}
        return wanted | {wish.digest for wish in self.pending()}

    def points_at(self, name: str, digest: str) -> bool:
        targets = [target for (owner, _), target in self.aliases.items() if owner == name]
        return digest in targets or digest in [d for (owner, _), (d, _) in self.canaries.items() if owner == name]

    def advance(self, now_s: float, may_expire: bool) -> None:
        if may_expire:
            self.expire(now_s)
        for wish in self.pending():
            staged = [member.has_staged(wish) for member in self.members.values()]
            informed = [member for member in self.members.values() if member.revision >= wish.requested_revision]
            if any(wish.digest in member.failed for member in informed):
                wish.state = ActivationState.FAILED
            elif staged and all(staged):
                wish.state = ActivationState.DONE
                self.flip(wish)
            elif now_s - wish.requested_at_s > TIMEOUT_S:
                wish.state = ActivationState.FAILED

    def flip(self, wish: Wish) -> None:
        key = (wish.name, wish.alias)
        if wish.weight is not None:
            self.canaries[key] = (wish.digest, wish.weight)
            return
        before = self.aliases.get(key)
        if before is not None and before != wish.digest:
            self.previous[key] = before
        self.aliases[key] = wish.digest
        self.canaries.pop(key, None)
        self.history.setdefault(key, []).append(wish.digest)

    def is_quiet(self, key: Key) -> bool:
        closed = self.closed[key]
        return all(
            member.revision >= closed.revision and key[1] not in member.running for member in self.members.values()
        )

    def settle(self, now_s: float) -> set[Key]:
        """What is retired now; the caller notes the revision."""
        retired = set()
        for key, closed in self.closed.items():
            state = self.states[key]
            if state is VersionState.DRAINING:
                assert closed.until_s is not None
                if now_s >= closed.until_s or (self.is_quiet(key) and now_s >= closed.at_s + LINGER_S):
                    retired.add(key)
            elif state is not VersionState.COLLECTED and closed.quiet_at_s is None and self.is_quiet(key):
                closed.quiet_at_s = now_s
        for key in retired:
            self.states[key] = VersionState.RETIRED
        return retired

    def expire(self, now_s: float) -> None:
        dead = {key: member for key, member in self.members.items() if member.renewed_at_s + TTL_S < now_s}
        self.members = {key: member for key, member in self.members.items() if key not in dead}
        for gone in sorted(dead.values(), key=lambda member: member.ring_id):
            younger = [member for member in self.members.values() if member.joined_at_s > gone.renewed_at_s]
            last = max(younger, key=lambda member: member.ring_id, default=gone)
            last.ring_id = min(last.ring_id, gone.ring_id)

    def close(self, name: str, digest: str, state: VersionState, closed: Closed) -> None:
        self.states[name, digest], self.closed[name, digest] = state, closed
        for wish in self.pending():
            if (wish.name, wish.digest) == (name, digest):
                wish.state = ActivationState.FAILED

    def remove_alias(self, name: str, alias: str) -> None:
        for table in (self.aliases, self.canaries, self.previous):
            table.pop((name, alias), None)  # type: ignore[attr-defined]


class RegistryMachine(RuleBasedStateMachine):
    """Every rule does the same to the registry and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="registry-machine-"))
        self.clock = Clock()
        self.clock.now_s = 1e10  # after every file's time: bytes that nothing needs are swept at once
        self.model = Model()
        self.follower = Catalog([])
        self.revision = 0
        self.digests: dict[int, str] = {}

    @initialize()
    def start(self) -> None:
        self._open()
        self.registry.publish_base(BASE, actor="r")
        for replica in REPLICAS[:2]:
            self.join(replica, set())

    def _open(self) -> None:
        self.registry = open_registry(
            self.folder / "data",
            self.clock,
            lease_ttl_s=TTL_S,
            activation_timeout_s=TIMEOUT_S,
            retention={"min_age_s": 0, "unused_s": 0, "grace_s": GRACE_S},
        )
        self.opened_at_s = self.clock.now_s

    def teardown(self) -> None:
        self.registry.check_integrity()
        self.registry.close()
        shutil.rmtree(self.folder)

    def _refused(self, error: type[RegistryError], operation: Callable[[], object]) -> None:
        """The registry refuses and nothing changes."""
        with pytest.raises(error):
            operation()

    @rule(name=names, seed=st.sampled_from(SEEDS), activate=st.booleans(), settles=st.booleans())
    def push(self, name: str, seed: int, activate: bool, settles: bool) -> None:
        files = plain_upload(self.folder / str(seed), BASE, seed)
        digest = self.digests.get(seed)
        if VersionState.QUARANTINED in [state for (_, known), state in self.model.states.items() if known == digest]:
            self._refused(Conflict, lambda: self.registry.push(name, files, owner="o"))
            return
        result = self.registry.push(name, files, owner="o", activate=activate)
        digest = result.version.digest
        assert self.digests.setdefault(seed, digest) == digest
        known = self.model.versions.setdefault(name, [])
        assert result.created is (digest not in known)
        if result.created:
            known.append(digest)
        self.model.states[name, digest] = ACTIVE
        self.model.closed.pop((name, digest), None)
        assert result.version.number == known.index(digest) + 1
        if result.activation is not None:
            self._wish(result.activation.activation_id, name, "live", digest, settles=settles)

    def _wish(
        self,
        activation_id: int,
        name: str,
        alias: str,
        digest: str,
        weight: float | None = None,
        *,
        settles: bool = False,
    ) -> None:
        """Note an activation; with `settles`, every replica says at once that it has what was asked for."""
        last = self.registry.events(self.revision)[-1]
        assert (last.kind, last.detail["activation_id"]) == ("activation_requested", str(activation_id))
        self.model.wish(Wish(activation_id, name, alias, digest, self.clock.now_s, last.revision, weight))
        if settles:
            self.everybody_reports(last.revision)

    def _digest(self, name: str, number: int) -> str | None:
        known = self.model.versions.get(name, [])
        return known[number - 1] if number <= len(known) else None

    @precondition(lambda self: self.model.versions)
    @rule(name=names, alias=aliases, number=st.integers(1, 4), settles=st.booleans())
    def activate(self, name: str, alias: str, number: int, settles: bool) -> None:
        digest = self._digest(name, number)
        if digest is None or self.model.states[name, digest] is not ACTIVE:
            error = AdapterNotFound if digest is None else Conflict
            self._refused(error, lambda: self.registry.activate(name, alias, number, actor="a"))
            return
        activation = self.registry.activate(name, alias, number, actor="a")
        self._wish(activation.activation_id, name, alias, digest, settles=settles)

    @precondition(lambda self: self.model.aliases)
    @rule(name=names, alias=aliases)
    def rollback(self, name: str, alias: str) -> None:
        current = self.model.aliases.get((name, alias))
        earlier = [
            digest
            for digest in self.model.history.get((name, alias), [])
            if digest != current and self.model.states[name, digest] is ACTIVE
        ]
        if current is None or not earlier:
            error = AdapterNotFound if current is None else Conflict
            self._refused(error, lambda: self.registry.rollback(name, alias, actor="a"))
            return
        activation = self.registry.rollback(name, alias, actor="a")
        assert activation.digest == earlier[-1]
        self._wish(activation.activation_id, name, alias, earlier[-1])

    @precondition(lambda self: self.model.aliases)
    @rule(which=st.integers(0, 3), number=st.integers(0, 4), weight=st.sampled_from((0.25, 1.0)), settles=st.booleans())
    def canary(self, which: int, number: int, weight: float, settles: bool) -> None:
        name, alias = sorted(self.model.aliases)[which % len(self.model.aliases)]
        number = 1 + number % (len(self.model.versions[name]) + 1)

        def start() -> Activation:
            return self.registry.canary(name, number, weight, alias=alias, actor="a")

        digest, current = self._digest(name, number), self.model.aliases.get((name, alias))
        if current is None or digest is None:
            self._refused(AdapterNotFound, start)
        elif digest == current or self.model.states[name, digest] is not ACTIVE:
            self._refused(Conflict, start)
        else:
            self._wish(start().activation_id, name, alias, digest, weight, settles=settles)

    @precondition(lambda self: self.model.canaries)
    @rule(name=names, alias=aliases, settles=st.booleans())
    def promote(self, name: str, alias: str, settles: bool) -> None:
        canary = self.model.canaries.get((name, alias))
        if canary is None:
            error = Conflict if (name, alias) in self.model.aliases else AdapterNotFound
            self._refused(error, lambda: self.registry.promote(name, alias=alias, actor="a"))
            return
        activation = self.registry.promote(name, alias=alias, actor="a")
        self._wish(activation.activation_id, name, alias, canary[0], settles=settles)

    @precondition(lambda self: self.model.aliases)
    @rule(name=names, alias=aliases)
    def halt(self, name: str, alias: str) -> None:
        waiting = [
            wish
            for wish in self.model.pending()
            if (wish.name, wish.alias) == (name, alias) and wish.weight is not None
        ]
        if (name, alias) not in self.model.canaries and not (waiting and (name, alias) in self.model.aliases):
            error = Conflict if (name, alias) in self.model.aliases else AdapterNotFound
            self._refused(error, lambda: self.registry.halt(name, alias=alias, actor="a"))
            return
        self.registry.halt(name, alias=alias, actor="a")
        self.model.canaries.pop((name, alias), None)
        for wish in waiting:
            wish.state = ActivationState.SUPERSEDED

    @precondition(lambda self: self.model.aliases)
    @rule(name=names, alias=aliases)
    def remove_alias(self, name: str, alias: str) -> None:
        if (name, alias) not in self.model.aliases:
            self._refused(AdapterNotFound, lambda: self.registry.remove_alias(name, alias, actor="a"))
            return
        self.registry.remove_alias(name, alias, actor="a")
        self.model.remove_alias(name, alias)
        self.model.supersede(name, alias)

    @precondition(lambda self: self.model.versions)
    @rule(name=names, number=st.integers(1, 4), deadline_s=st.sampled_from((0.0, 30.0)))
    def retire_version(self, name: str, number: int, deadline_s: float) -> None:
        digest = self._digest(name, number)
        if digest is None or self.model.points_at(name, digest):
            error = AdapterNotFound if digest is None else Conflict
            self._refused(error, lambda: self.registry.retire(name, number, actor="a", deadline_s=deadline_s))
            return
        self.registry.retire(name, number, actor="a", deadline_s=deadline_s)
        self._retired(name, [digest], deadline_s)

    @precondition(lambda self: self.model.versions)
    @rule(name=names, deadline_s=st.sampled_from((0.0, 30.0)))
    def retire_adapter(self, name: str, deadline_s: float) -> None:
        if name not in self.model.versions:
            self._refused(AdapterNotFound, lambda: self.registry.retire(name, None, actor="a"))
            return
        self.registry.retire(name, None, actor="a", deadline_s=deadline_s)
        for alias in ALIASES:
            self.model.remove_alias(name, alias)
        self._retired(name, self.model.versions[name], deadline_s)

    def _retired(self, name: str, digests: Sequence[str], deadline_s: float) -> None:
        """Note what a retirement did; of revisions, what the registry says."""
        drains, now_s = deadline_s > 0 and bool(self.model.members), self.clock.now_s
        begun, ended = self._revisions("version_draining"), self._revisions("version_retired")
        for digest in digests:
            key, state = (name, digest), self.model.states[name, digest]
            if state not in (ACTIVE, VersionState.DRAINING):
                continue
            if not drains:
                self.model.close(name, digest, VersionState.RETIRED, Closed(ended[key], now_s))
            elif state is ACTIVE:
                self.model.close(name, digest, VersionState.DRAINING, Closed(begun[key], now_s, now_s + deadline_s))
            else:
                self.model.closed[key].until_s = now_s + deadline_s

    def _revisions(self, kind: str) -> dict[Key, int]:
        """The revisions of this step's events of one kind, by name and digest."""
        events = self.registry.events(self.revision, 1000)
        return {(event.name or "", event.digest or ""): event.revision for event in events if event.kind == kind}

    @precondition(lambda self: self.model.versions)
    @rule(name=names, number=st.integers(1, 4))
    def quarantine(self, name: str, number: int) -> None:
        digest = self._digest(name, number)
        if digest is None:
            self._refused(AdapterNotFound, lambda: self.registry.quarantine(name, number, actor="a", reason="r"))
            return
        self.registry.quarantine(name, number, actor="a", reason="r")
        for key, revision in self._revisions("version_quarantined").items():
            self.model.close(*key, VersionState.QUARANTINED, Closed(revision, self.clock.now_s))
        for owner in NAMES:
            assert self.model.states.get((owner, digest), VersionState.QUARANTINED) is VersionState.QUARANTINED
        self.model.canaries = {key: canary for key, canary in self.model.canaries.items() if canary[0] != digest}

    @precondition(lambda self: self.model.closed)
    @rule(dry_run=st.booleans())
    def collect(self, dry_run: bool) -> None:
        now_s, running = self.clock.now_s, {d for member in self.model.members.values() for d in member.running}
        due = {
            key
            for key, closed in self.model.closed.items()
            if self.model.states[key] is VersionState.RETIRED
            and closed.quiet_at_s is not None
            and now_s - closed.quiet_at_s >= GRACE_S
            and key[1] not in running
        }
        report = self.registry.collect(actor="a", dry_run=dry_run)
        gone = [item for item in report.items if item.action is CollectAction.COLLECT]
        assert {(item.name, item.digest) for item in gone} == due
        if not dry_run:
            for key in due:
                self.model.states[key] = VersionState.COLLECTED
            self._check_bytes()

    def _check_bytes(self) -> None:
        """Exactly what some version still needs is in the store."""
        for digest in set(self.digests.values()):
            states = [state for (_, known), state in self.model.states.items() if known == digest]
            needed = any(state is not VersionState.COLLECTED for state in states)
            assert self.registry.blobs.exists(self.registry.manifest(digest).blob_sha256) is needed

    @rule(replica=replicas, missing=st.sets(st.sampled_from(SEEDS), max_size=2))
    def join(self, replica: str, missing: set[int]) -> None:
        lacking = {self.digests[seed] for seed in missing if seed in self.digests}
        staged = frozenset(self.digests.values()) - lacking
        absent = self.model.required() - staged
        if absent:
            with pytest.raises(JoinRefused) as caught:
                self._join(replica, staged)
            assert set(caught.value.missing) == absent
            return
        taken = {member.ring_id for member in self.model.members.values()}
        free = next(ring_id for ring_id in range(9) if ring_id not in taken)
        now_s = self.clock.now_s
        known = self.model.members.get(replica)
        member = (
            Member(known.ring_id, known.joined_at_s, now_s, staged) if known else Member(free, now_s, now_s, staged)
        )
        assert self._join(replica, staged) == member.ring_id
        self.model.members[replica] = member

    def _join(self, replica: str, staged: frozenset[str]) -> int:
        return self.registry.join_replica(
            replica_id=replica, node_id="n", num_slots=1, base_digest=BASE.digest, staged=sorted(staged)
        ).ring_id

    @rule(
        replica=replicas,
        unstaged=st.sets(st.sampled_from(SEEDS), max_size=1),
        broken=st.sampled_from((None, 0, 1)),
        age=st.integers(0, 3),
        holds=st.booleans(),
        busy=st.sets(st.sampled_from(SEEDS), max_size=1),
    )
    def renew(
        self, replica: str, unstaged: set[int], broken: int | None, age: int, holds: bool, busy: set[int]
    ) -> None:
        """`age` is by how many revisions the replica lags behind; it may have bytes on demand only."""
        lacking = {self.digests[seed] for seed in unstaged if seed in self.digests}
        failed = frozenset({self.digests[broken]} if broken in self.digests and broken in unstaged else ())
        staged = frozenset(self.digests.values()) - lacking
        held = staged if holds else frozenset()
        running = frozenset(self.digests[seed] for seed in busy if seed in self.digests)
        record = self.registry.renew_replica(
            replica,
            revision=self.revision - age,
            staged=sorted(staged),
            held=sorted(held),
            failed=dict.fromkeys(failed, "broken"),
            running=sorted(running),
        )
        assert (record is None) is (replica not in self.model.members)
        if record is not None:
            joined_at_s, now_s = self.model.members[replica].joined_at_s, self.clock.now_s
            self.model.members[replica] = Member(
                record.ring_id, joined_at_s, now_s, staged, failed, self.revision - age, held, running
            )
        self.advance()

    def everybody_reports(self, revision: int) -> None:
        """All is staged and nothing runs: what waits goes on."""
        staged = sorted(self.digests.values())
        for replica, member in list(self.model.members.items()):
            self.registry.renew_replica(replica, revision=revision, staged=staged, held=staged)
            everything = frozenset(staged)
            self.model.members[replica] = Member(
                member.ring_id, member.joined_at_s, self.clock.now_s, everything, revision=revision, held=everything
            )
        self.advance()

    @precondition(lambda self: self.model.members)
    @rule(replica=replicas)
    def leave(self, replica: str) -> None:
        self.registry.leave_replica(replica)
        self.model.members.pop(replica, None)

    @rule(seconds=st.sampled_from((1.0, 6.0, 11.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def advance(self) -> None:
        self.registry.advance()
        self.model.advance(self.clock.now_s, self.clock.now_s >= self.opened_at_s + TTL_S)
        retired, revisions = self.model.settle(self.clock.now_s), self._revisions("version_retired")
        for key in retired:
            self.model.closed[key].revision = revisions[key]
        assert not self.registry.advance()
        assert not self.model.settle(self.clock.now_s)

    @rule()
    def restart(self) -> None:
        self.registry.close()
        self._open()

    @rule()
    def follow(self) -> None:
        delta = self.registry.changes(self.follower.revision)
        if delta is not None:
            self.follower.apply(delta)

    @invariant()
    def revisions_only_grow(self) -> None:
        if hasattr(self, "registry"):
            snapshot = self.registry.changes(0)
            assert snapshot is not None
            assert snapshot.revision >= self.revision
            assert [event.revision for event in self.registry.events(self.revision)] == list(
                range(self.revision + 1, snapshot.revision + 1)
            )
            self.revision = snapshot.revision

    @invariant()
    def snapshot_equals_the_model(self) -> None:
        if not hasattr(self, "registry"):
            return
        for record in self.registry.adapters():
            known = self.model.versions[record.name]
            assert [version.digest for version in record.versions] == known
            for version in record.versions:
                assert version.state is self.model.states[record.name, version.digest]
            assert {(record.name, alias): known[number - 1] for alias, number in record.aliases.items()} == {
                key: digest for key, digest in self.model.aliases.items() if key[0] == record.name
            }
            assert {(record.name, alias): known[number - 1] for alias, number in record.previous.items()} == {
                key: digest for key, digest in self.model.previous.items() if key[0] == record.name
            }
            assert record.canaries == {
                alias: Canary(number=known.index(digest) + 1, weight=weight)
                for (name, alias), (digest, weight) in self.model.canaries.items()
                if name == record.name
            }
            waiting = {wish.digest for wish in self.model.pending() if wish.name == record.name}
            assert set(record.pending) == waiting
        for wish in self.model.wishes[-3:]:
            assert self.registry.activation(wish.activation_id).state is wish.state

    @invariant()
    def members_equal_the_model(self) -> None:
        if hasattr(self, "registry"):
            snapshot = self.registry.changes(0)
            assert snapshot is not None
            assert {record.replica_id: record.ring_id for record in snapshot.replicas} == {
                name: member.ring_id for name, member in self.model.members.items()
            }
            assert len({record.ring_id for record in snapshot.replicas}) == len(snapshot.replicas)

    @invariant()
    def follower_that_has_caught_up_equals_a_snapshot(self) -> None:
        if hasattr(self, "registry"):
            fresh = Catalog([])
            fresh.apply(self.registry.changes(0) or pytest.fail("no snapshot"))
            if fresh.revision == self.follower.revision:
                assert fresh.adapters == self.follower.adapters
                assert fresh.base == self.follower.base


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@pytest.mark.services
@pytest.mark.usefixtures("postgres")
class TestRegistryMachineOnPostgres(RegistryMachine.TestCase):
    """The same histories on PostgreSQL."""

    settings = TestRegistryMachine.settings


@pytest.mark.soak
class TestRegistryMachineForLong(RegistryMachine.TestCase):
    """Many histories, longer ones."""

    settings = settings(TestRegistryMachine.settings, max_examples=400, stateful_step_count=80)
