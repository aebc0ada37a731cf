"""Resolving a request's model against the catalog, and following deltas."""

import pytest

from registry.catalog import Catalog, Resolution
from registry.errors import ModelNotFound
from registry.types import AdapterRecord, CatalogDelta, VersionState
from tests.registry.uploads import make_base, sha, version


def adapter(name: str, revision: int = 1, callers: tuple[str, ...] = ("*",), **aliases: int) -> AdapterRecord:
    versions = (version(1), version(2), version(3, VersionState.RETIRED), version(4, VersionState.QUARANTINED))
    return AdapterRecord(
        name=name,
        owner="owner",
        callers=callers,
        revision=revision,
        created_at_s=0.0,
        aliases=aliases,
        versions=versions,
    )


def delta(revision: int, *adapters: AdapterRecord, full: bool = True) -> CatalogDelta:
    return CatalogDelta(revision=revision, full=full, adapters=adapters, replicas=(), base=make_base("acme/tiny"))


@pytest.fixture
def catalog() -> Catalog:
    catalog = Catalog(["gpt-oss:120b", "org/base", "twin"])
    catalog.apply(
        delta(
            7,
            adapter("alice", live=2, canary=1, stable=3, sick=4),
            adapter("twin", live=1),
            adapter("mine", callers=(), live=1),
            adapter("shared", callers=("friend",), live=1),
            adapter("young"),
        )
    )
    return catalog


@pytest.mark.parametrize("model", ["gpt-oss:120b", "org/base", "twin", "acme/tiny"])
def test_base_name_matches_first_and_exactly(catalog: Catalog, model: str) -> None:
    assert catalog.resolve("anyone", model) == Resolution(model=model)


@pytest.mark.parametrize(
    ("model", "number"),
    [("alice", 2), ("alice@live", 2), ("alice@canary", 1), ("alice@1", 1), ("alice@2", 2), ("twin@live", 1)],
)
def test_reference_resolves_to_a_version(catalog: Catalog, model: str, number: int) -> None:
    name = model.partition("@")[0]
    wanted = Resolution(model=model, adapter=name, number=number, digest=sha(str(number)))
    assert catalog.resolve("anyone", model) == wanted


@pytest.mark.parametrize(
    "model",
    [
        "",
        "@",
        "@1",
        "alice@",
        "alice@0",
        "alice@01",
        "alice@-1",
        "alice@+1",
        "alice@1.0",
        "alice@ 1",
        "alice@99",
        "alice@" + "9" * 5000,
        "alice@²",
        "alice@\u0661",
        "alice@3",
        "alice@4",
        "alice@stable",
        "alice@sick",
        "alice@Live",
        "alice@live@1",
        "alice@nope",
        "Alice",
        "alice ",
        "alice\n",
        "young",
        "a:b",
        "a/b",
        "a%2Fb",
        "ü",
        "x" * 300,
        "x" * 1_000_000,
        "../alice",
        "gpt-oss",
        "gpt-oss:120b@1",
        "ORG/base",
        "tiny",
        "\ud800",
    ],
    ids=lambda model: repr(model[:20]),
)
def test_anything_else_is_not_found(catalog: Catalog, model: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        catalog.resolve("anyone", model)
    assert len(caught.value.message) < 250
    caught.value.message.encode()


@pytest.mark.parametrize(
    ("tenant", "model", "allowed"),
    [
        ("owner", "mine", True),
        ("friend", "mine", False),
        ("owner", "shared", True),
        ("friend", "shared", True),
        ("stranger", "shared", False),
        ("stranger", "alice", True),
    ],
)
def test_only_callers_may_resolve(catalog: Catalog, tenant: str, model: str, allowed: bool) -> None:
    assert (model in [record.name for record in catalog.adapters_for(tenant)]) is allowed
    if allowed:
        assert catalog.resolve(tenant, model).adapter == model
        return
    with pytest.raises(ModelNotFound) as hidden:
        catalog.resolve(tenant, model)
    with pytest.raises(ModelNotFound) as absent:
        catalog.resolve(tenant, "absent")
    assert hidden.value.message == absent.value.message.replace("absent", model)


def test_empty_catalog_knows_its_base_names_only() -> None:
    catalog = Catalog(["base"])
    assert catalog.resolve("t", "base").digest is None
    with pytest.raises(ModelNotFound):
        catalog.resolve("t", "alice")


def test_delta_adds_to_what_is_known(catalog: Catalog) -> None:
    assert catalog.apply(delta(8, adapter("bob", 8, live=1), full=False))
    assert catalog.resolve("t", "bob").number == 1
    assert catalog.resolve("t", "alice").number == 2
    assert catalog.revision == 8


def test_snapshot_replaces_what_is_known(catalog: Catalog) -> None:
    assert catalog.apply(delta(3, adapter("bob", 3, live=1)))
    assert catalog.names == ("bob",)
    assert catalog.revision == 3


def test_old_delta_is_ignored(catalog: Catalog) -> None:
    assert not catalog.apply(delta(7, adapter("alice", 7, live=1), full=False))
    assert catalog.resolve("t", "alice").number == 2


def test_snapshot_that_brings_nothing_new_changes_nothing(catalog: Catalog) -> None:
    again = delta(7, *catalog.adapters)
    assert not catalog.apply(again)


def test_names_leave_out_what_has_no_version_in_service() -> None:
    catalog = Catalog([])
    gone = adapter("gone").model_copy(update={"versions": (version(1, VersionState.RETIRED),)})
    catalog.apply(delta(1, gone, adapter("here")))
    assert catalog.names == ("here",)
