"""Random histories of one registry against a plain model: what aliases may do, and what followers see."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from registry.catalog import Catalog
from registry.errors import AdapterNotFound, Conflict, JoinRefused
from registry.types import ActivationState, VersionState
from tests.registry.uploads import Clock, make_base, open_registry, plain_upload

BASE = make_base()
NAMES = ("alice", "bob")
ALIASES = ("live", "canary")
SEEDS = range(4)
REPLICAS = ("r0", "r1", "r2")
TTL_S, TIMEOUT_S = 10.0, 60.0

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

    def has_staged(self, wish: Wish) -> bool:
        seen = self.revision >= wish.requested_revision
        return wish.digest in self.staged and (seen or wish.digest in self.held)


@dataclass
class Model:
    """What the registry should hold, kept in the plainest way."""

    versions: dict[str, list[str]] = field(default_factory=dict)
    retired: set[tuple[str, str]] = field(default_factory=set)
    aliases: dict[tuple[str, str], str] = field(default_factory=dict)
    history: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    wishes: list[Wish] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)

    def pending(self) -> list[Wish]:
        return [wish for wish in self.wishes if wish.state is ActivationState.PENDING]

    def wish(self, activation_id: int, name: str, alias: str, digest: str, now_s: float, revision: int) -> None:
        for older in self.pending():
            if (older.name, older.alias) == (name, alias):
                older.state = ActivationState.SUPERSEDED
        self.wishes.append(Wish(activation_id, name, alias, digest, now_s, revision))

    def required(self) -> set[str]:
        return set(self.aliases.values()) | {wish.digest for wish in self.pending()}

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
                self.aliases[wish.name, wish.alias] = wish.digest
                self.history.setdefault((wish.name, wish.alias), []).append(wish.digest)
            elif now_s - wish.requested_at_s > TIMEOUT_S:
                wish.state = ActivationState.FAILED

    def expire(self, now_s: float) -> None:
        dead = {key: member for key, member in self.members.items() if member.renewed_at_s + TTL_S < now_s}
        self.members = {key: member for key, member in self.members.items() if key not in dead}
        for gone in sorted(dead.values(), key=lambda member: member.ring_id):
            younger = [member for member in self.members.values() if member.joined_at_s > gone.renewed_at_s]
            last = max(younger, key=lambda member: member.ring_id, default=gone)
            last.ring_id = min(last.ring_id, gone.ring_id)

    def retire(self, name: str, digest: str) -> None:
        self.retired.add((name, digest))
        for wish in self.pending():
            if (wish.name, wish.digest) == (name, digest):
                wish.state = ActivationState.FAILED


class RegistryMachine(RuleBasedStateMachine):
    """Every rule does the same to the registry and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="registry-machine-"))
        self.clock = Clock()
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
            self.folder / "data", self.clock, lease_ttl_s=TTL_S, activation_timeout_s=TIMEOUT_S, retire_deadline_s=0
        )
        self.opened_at_s = self.clock.now_s

    def teardown(self) -> None:
        self.registry.check_integrity()
        self.registry.close()
        shutil.rmtree(self.folder)

    @rule(name=names, seed=st.sampled_from(SEEDS), activate=st.booleans())
    def push(self, name: str, seed: int, activate: bool) -> None:
        result = self.registry.push(
            name, plain_upload(self.folder / str(seed), BASE, seed), owner="o", activate=activate
        )
        digest = result.version.digest
        assert self.digests.setdefault(seed, digest) == digest
        known = self.model.versions.setdefault(name, [])
        assert result.created is (digest not in known)
        if result.created:
            known.append(digest)
        self.model.retired.discard((name, digest))
        assert result.version.number == known.index(digest) + 1
        if result.activation is not None:
            self._wish(result.activation.activation_id, name, "live", digest)

    def _wish(self, activation_id: int, name: str, alias: str, digest: str) -> None:
        last = self.registry.events(self.revision)[-1]
        assert (last.kind, last.detail["activation_id"]) == ("activation_requested", str(activation_id))
        self.model.wish(activation_id, name, alias, digest, self.clock.now_s, last.revision)

    @rule(name=names, alias=aliases, number=st.integers(1, 4))
    def activate(self, name: str, alias: str, number: int) -> None:
        known = self.model.versions.get(name, [])
        if number > len(known):
            with pytest.raises(AdapterNotFound):
                self.registry.activate(name, alias, number, actor="a")
        elif (name, known[number - 1]) in self.model.retired:
            with pytest.raises(Conflict):
                self.registry.activate(name, alias, number, actor="a")
        else:
            activation = self.registry.activate(name, alias, number, actor="a")
            self._wish(activation.activation_id, name, alias, known[number - 1])

    @rule(name=names, alias=aliases)
    def rollback(self, name: str, alias: str) -> None:
        current = self.model.aliases.get((name, alias))
        earlier = [
            digest
            for digest in self.model.history.get((name, alias), [])
            if digest != current and (name, digest) not in self.model.retired
        ]
        if current is None or not earlier:
            with pytest.raises(AdapterNotFound if current is None else Conflict):
                self.registry.rollback(name, alias, actor="a")
            return
        activation = self.registry.rollback(name, alias, actor="a")
        assert activation.digest == earlier[-1]
        self._wish(activation.activation_id, name, alias, earlier[-1])

    @rule(name=names, number=st.integers(1, 4))
    def retire_version(self, name: str, number: int) -> None:
        known = self.model.versions.get(name, [])
        if number > len(known):
            with pytest.raises(AdapterNotFound):
                self.registry.retire(name, number, actor="a")
        elif known[number - 1] in [digest for (n, _), digest in self.model.aliases.items() if n == name]:
            with pytest.raises(Conflict):
                self.registry.retire(name, number, actor="a")
        else:
            self.registry.retire(name, number, actor="a")
            self.model.retire(name, known[number - 1])

    @rule(name=names)
    def retire_adapter(self, name: str) -> None:
        if name not in self.model.versions:
            with pytest.raises(AdapterNotFound):
                self.registry.retire(name, None, actor="a")
            return
        self.registry.retire(name, None, actor="a")
        self.model.aliases = {key: digest for key, digest in self.model.aliases.items() if key[0] != name}
        for digest in self.model.versions[name]:
            self.model.retire(name, digest)

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
    )
    def renew(self, replica: str, unstaged: set[int], broken: int | None, age: int, holds: bool) -> None:
        """`age` is by how many revisions the replica lags behind; it may have bytes on demand only."""
        lacking = {self.digests[seed] for seed in unstaged if seed in self.digests}
        failed = frozenset({self.digests[broken]} if broken in self.digests and broken in unstaged else ())
        staged = frozenset(self.digests.values()) - lacking
        held = staged if holds else frozenset()
        record = self.registry.renew_replica(
            replica,
            revision=self.revision - age,
            staged=sorted(staged),
            held=sorted(held),
            failed=dict.fromkeys(failed, "broken"),
        )
        assert (record is None) is (replica not in self.model.members)
        if record is not None:
            member = self.model.members[replica]
            self.model.members[replica] = Member(
                record.ring_id, member.joined_at_s, self.clock.now_s, staged, failed, self.revision - age, held
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
        assert not self.registry.advance()

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
                retired = (record.name, version.digest) in self.model.retired
                assert version.state is (VersionState.RETIRED if retired else VersionState.ACTIVE)
            assert {(record.name, alias): known[number - 1] for alias, number in record.aliases.items()} == {
                key: digest for key, digest in self.model.aliases.items() if key[0] == record.name
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
