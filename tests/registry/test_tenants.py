"""Tenants, keys and quotas in the registry, and how gateways share limits."""

from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import select

from registry import keys as key_text
from registry import tables
from registry.config import RegistryConfig
from registry.errors import AdapterNotFound, Conflict, InvalidAdapter, KeyNotFound, QuotaExceeded, TenantNotFound
from registry.service import Registry
from registry.sharing import split
from registry.types import LimitUse, Scope, TenantLimits
from tests.registry.uploads import Clock, make_base, open_registry, plain_upload

BASE = make_base()

NUMBERS = count(1)
"""Of messages on limits, over all gateways."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Registry:
    registry = open_registry(tmp_path, clock, tenant_defaults=TenantLimits(weight=1.0, max_adapters=2))
    registry.publish_base(BASE, actor="r")
    return registry


def test_key_is_known_again_and_its_secret_is_stored_nowhere(registry: Registry, tmp_path: Path) -> None:
    registry.tenants.add("acme", TenantLimits(), actor="a")
    made = registry.tenants.new_key("acme", (Scope.UPLOAD, Scope.INFER), expires_at_s=None, note="ci", actor="a")
    parts = key_text.split(made.secret)
    assert parts is not None
    assert parts[0] == made.key.key_id
    assert made.key.scopes == (Scope.INFER, Scope.UPLOAD)
    access = registry.changes(0, with_access=True).access  # type: ignore[union-attr]
    assert access is not None
    (known,) = access.keys
    assert key_text.is_secret(known.salt, known.hash, parts[1])
    assert not key_text.is_secret(known.salt, known.hash, parts[1][:-1] + "x")
    assert parts[1] not in repr(made) + repr(known) + repr(access)
    assert known.hash not in repr(access)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(parts[1].encode() in data for data in written)
    assert all(parts[1] not in event.model_dump_json() for event in registry.events(0))


def test_access_comes_only_to_those_that_ask_and_when_it_changed(registry: Registry) -> None:
    registry.tenants.add("acme", TenantLimits(max_concurrent=3), actor="a")
    revision = registry.changes(0).revision  # type: ignore[union-attr]
    assert registry.changes(0).access is None  # type: ignore[union-attr]
    registry.publish_base(BASE.model_copy(update={"revision": "x"}), actor="r")
    assert registry.changes(revision, with_access=True).access is None  # type: ignore[union-attr]
    registry.tenants.set_limits("acme", TenantLimits(max_concurrent=4), actor="a")
    access = registry.changes(revision, with_access=True).access  # type: ignore[union-attr]
    assert access is not None
    assert (access.limits["acme"].max_concurrent, access.limits["acme"].max_adapters) == (4, 2)
    assert (access.has_keys, access.defaults.max_adapters) == (False, 2)


def test_rotation_overlaps_and_revocation_does_not(registry: Registry, clock: Clock) -> None:
    registry.tenants.add("acme", TenantLimits(), actor="a")
    old = registry.tenants.new_key("acme", (Scope.INFER,), expires_at_s=None, note="n", actor="a").key
    new = registry.tenants.rotate_key(old.key_id, overlap_s=60, expires_at_s=None, actor="a").key
    by_id = {key.key_id: key for key in registry.tenants.keys("acme")}
    assert by_id[old.key_id].expires_at_s == clock() + 60
    assert (new.scopes, new.note, new.expires_at_s) == (old.scopes, "n", None)
    registry.tenants.revoke_key(new.key_id, actor="a")
    access = registry.changes(0, with_access=True).access  # type: ignore[union-attr]
    assert access is not None
    assert [key.key_id for key in access.keys] == [old.key_id]
    with pytest.raises(Conflict, match="revoked"):
        registry.tenants.rotate_key(new.key_id, overlap_s=0, expires_at_s=None, actor="a")
    with pytest.raises(KeyNotFound):
        registry.tenants.revoke_key("0" * 12, actor="a")


def test_successor_of_a_key_that_expires_expires(registry: Registry) -> None:
    registry.tenants.add("acme", TenantLimits(), actor="a")
    old = registry.tenants.new_key("acme", (Scope.INFER,), expires_at_s=5000.0, note="", actor="a").key
    with pytest.raises(Conflict, match="say when"):
        registry.tenants.rotate_key(old.key_id, overlap_s=60, expires_at_s=None, actor="a")
    assert len(registry.tenants.keys("acme")) == 1
    assert registry.tenants.keys("acme")[0].expires_at_s == 5000.0
    new = registry.tenants.rotate_key(old.key_id, overlap_s=60, expires_at_s=9000.0, actor="a").key
    assert new.expires_at_s == 9000.0


def test_server_that_had_keys_does_not_open_when_they_are_gone(registry: Registry) -> None:
    registry.tenants.add("acme", TenantLimits(), actor="a")
    registry.tenants.new_key("acme", (Scope.ADMIN,), expires_at_s=None, note="", actor="a")
    registry.tenants.remove("acme", actor="a")
    access = registry.changes(0, with_access=True).access  # type: ignore[union-attr]
    assert access is not None
    assert (access.has_keys, access.keys, access.limits) == (True, (), {})
    registry.tenants.add("acme", TenantLimits(), actor="a")
    assert registry.tenants.keys("acme")[0].revoked_at_s is not None


def test_last_use_is_written_lazily_and_takes_no_revision(registry: Registry, clock: Clock) -> None:
    key = registry.tenants.first_key("root", note="").key
    revision = registry.changes(0).revision  # type: ignore[union-attr]
    registry.renew_gateway("g", revision)
    started_s = clock.now_s
    for wait_s, expected_s in ((0, 0), (30, 0), (31, 61)):
        clock.now_s += wait_s
        registry.tenants.share_limits("g", 1, (), (key.key_id,))
        assert registry.tenants.keys()[0].used_at_s == started_s + expected_s
    assert registry.changes(revision) is None


def test_quota_of_adapters_and_bytes_is_named_and_nothing_is_stored(registry: Registry, tmp_path: Path) -> None:
    files = [plain_upload(tmp_path / f"up{i}", BASE, seed=i) for i in range(3)]
    for i in range(2):
        registry.push(f"a{i}", files[i], owner="acme")
    with pytest.raises(QuotaExceeded) as refused:
        registry.push("a2", files[2], owner="acme")
    assert refused.value.limit == "max_adapters"
    assert registry.tenants.access_of("a2") is None
    registry.push("a2", files[2], owner="other")
    registry.tenants.add("acme", TenantLimits(max_adapters=9, max_stored_bytes=1), actor="a")
    assert registry.tenants.one("acme").num_adapters == 2
    with pytest.raises(QuotaExceeded) as refused:
        registry.push("a3", files[2], owner="acme")
    assert refused.value.limit == "max_stored_bytes"
    registry.check_integrity()


def test_new_adapter_is_private_unless_configured(tmp_path: Path) -> None:
    for kind, callers in (("private", ()), ("public", ("*",))):
        registry = open_registry(tmp_path / kind, new_adapters=kind)
        registry.publish_base(BASE, actor="r")
        registry.push("mine", plain_upload(tmp_path / f"up-{kind}", BASE), owner="acme")
        assert registry.adapter("mine").callers == callers
        registry.close()
    assert RegistryConfig().first_callers == ()


def test_tenant_that_owns_what_is_served_stays(registry: Registry, tmp_path: Path) -> None:
    registry.tenants.add("acme", TenantLimits(), actor="a")
    registry.push("mine", plain_upload(tmp_path / "up", BASE), owner="acme", activate=False)
    with pytest.raises(Conflict, match="mine"):
        registry.tenants.remove("acme", actor="a")
    with pytest.raises(Conflict, match="already"):
        registry.tenants.add("acme", TenantLimits(), actor="a")
    with pytest.raises(TenantNotFound):
        registry.tenants.set_limits("nobody", TenantLimits(), actor="a")
    with pytest.raises(InvalidAdapter):
        registry.tenants.add("../x", TenantLimits(), actor="a")
    with pytest.raises(AdapterNotFound):
        registry.tenants.set_callers("nothing", ["acme"], actor="a")


@given(st.integers(0, 10_000), st.lists(st.integers(0, 20_000), min_size=1, max_size=8))
def test_parts_add_up_and_are_max_min_fair(limit: int, wanted: list[int]) -> None:
    parts = split(limit, wanted)
    assert sum(parts) == limit
    short = [part for part, want in zip(parts, wanted, strict=True) if part < want]
    assert not short or max(parts) - min(short) <= 1, "one that goes short has as much as any other"
    assert not short or sum(wanted) > limit


class Sharing(RuleBasedStateMachine):
    """Gateways that use, release, report and lose answers: together they never hold more than the limit."""

    LIMIT = 20

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.registry = open_registry(Path(self.folder.name))
        self.registry.tenants.add("acme", TenantLimits(max_concurrent=self.LIMIT), actor="a")
        self.parts: dict[str, list[int]] = {}
        """Gateway -> [granted, target, used]."""

    def teardown(self) -> None:
        self.registry.close()
        self.folder.cleanup()

    @rule(name=st.sampled_from("abc"))
    def begin(self, name: str) -> None:
        self.registry.renew_gateway(name, 1)
        self.parts.setdefault(name, [0, 0, 0])

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), amount=st.integers(0, 20))
    def use(self, data: st.DataObject, amount: int) -> None:
        part = self.parts[data.draw(st.sampled_from(sorted(self.parts)))]
        part[2] = min(amount, part[0])

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), wanted=st.integers(0, 40), is_lost=st.booleans())
    def report(self, data: st.DataObject, wanted: int, is_lost: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.parts)))
        part = self.parts[name]
        part[0] = min(part[0], max(part[2], part[1]))
        use = LimitUse(tenant="acme", limit="max_concurrent", held=part[0], wanted=max(wanted, part[2]))
        (share,) = self.registry.tenants.share_limits(name, next(NUMBERS), (use,)) or ()
        assert share.granted >= part[0]
        if not is_lost:
            part[0], part[1] = share.granted, share.target

    @invariant()
    def gateways_together_hold_at_most_the_limit(self) -> None:
        assert sum(part[0] for part in self.parts.values()) <= self.LIMIT
        assert all(part[2] <= part[0] for part in self.parts.values())


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=40, deadline=None)


def test_whole_limit_goes_where_it_is_wanted_and_back(registry: Registry) -> None:
    registry.tenants.add("acme", TenantLimits(max_concurrent=16), actor="a")
    parts = {name: [0, 0] for name in "ab"}

    def rounds(wants: dict[str, int]) -> dict[str, int]:
        for _ in range(3):
            for name, want in wants.items():
                held = min(parts[name])
                use = LimitUse(tenant="acme", limit="max_concurrent", held=held, wanted=want)
                shares = registry.tenants.share_limits(name, next(NUMBERS), (use,)) or ()
                parts[name] = [shares[0].granted, shares[0].target]
        return {name: granted for name, (granted, _) in parts.items()}

    for name in "ab":
        registry.renew_gateway(name, 1)
    assert rounds({"a": 99, "b": 99}) == {"a": 8, "b": 8}
    assert rounds({"a": 99, "b": 0}) == {"a": 15, "b": 1}
    assert rounds({"a": 0, "b": 99}) == {"a": 1, "b": 15}
    registry.leave_gateway("a")
    assert rounds({"b": 99})["b"] == 16
    assert registry.tenants.share_limits("gone", 1, ()) is None


def test_parts_of_a_limit_that_was_lifted_are_forgotten(registry: Registry) -> None:
    registry.tenants.add("acme", TenantLimits(max_concurrent=4), actor="a")
    registry.renew_gateway("g", 1)
    use = LimitUse(tenant="acme", limit="max_concurrent", held=0, wanted=1)
    assert registry.tenants.share_limits("g", 1, (use,)) != ()
    registry.tenants.set_limits("acme", TenantLimits(), actor="a")
    assert registry.tenants.share_limits("g", 2, ()) == ()
    with registry._database.read() as connection:
        assert connection.execute(select(tables.gateways.c.held)).scalar_one() == {}


def test_a_message_on_limits_that_was_overtaken_or_comes_again_changes_nothing(registry: Registry) -> None:
    registry.tenants.add("acme", TenantLimits(max_concurrent=8), actor="a")
    key = registry.tenants.new_key("acme", (Scope.INFER,), expires_at_s=None, note="", actor="a")
    for name in "gh":
        registry.renew_gateway(name, 1)

    def say(name: str, number: int, held: int, wanted: int, *keys: str) -> list[int]:
        use = LimitUse(tenant="acme", limit="max_concurrent", held=held, wanted=wanted)
        return [share.granted for share in registry.tenants.share_limits(name, number, (use,), keys) or ()]

    assert say("g", 1, 0, 8) == [8]
    assert say("g", 3, 8, 8) == [8]
    assert say("g", 2, 1, 0, key.key.key_id) == [], "it held 1 before it held 8"
    assert say("g", 3, 0, 0) == []
    assert say("h", 1, 0, 8) == [0], "all of the limit is held"
    assert registry.tenants.keys("acme")[0].used_at_s is not None
    assert say("g", 4, 2, 2) == [2]
    assert say("h", 2, 0, 6) == [6]
