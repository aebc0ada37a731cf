"""`lorafleet tenant`, `key` and `callers` through a real gateway, with keys, to a real registry."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.cli import main
from registry.catalog import Catalog
from registry.types import Scope
from router.app import create_app
from router.auth import KeyAuthenticator
from router.config import RouterConfig
from router.gateway import Gateway
from tests.cluster.cli_harness import Cli
from tests.cluster.http_server import serving_app
from tests.local_fleet import LocalRegistry
from tests.registry.two_replicas import TwoReplicas
from tests.router.fakes import FakeFleet


@contextmanager
def serving(setup: TwoReplicas) -> Iterator[str]:
    """A gateway that asks the registry who may come in, at every call."""

    def access() -> object:
        delta = setup.registry.changes(0, with_access=True)
        return None if delta is None else delta.access

    door = KeyAuthenticator(access, open_without_keys=True)  # type: ignore[arg-type]
    registry = LocalRegistry(setup.registry)
    gateway = Gateway(RouterConfig(), Catalog(("base",)), FakeFleet(), registry, authenticator=door)
    with serving_app(create_app(gateway)) as url:
        yield url


@pytest.fixture
def cli(setup: TwoReplicas, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with serving(setup) as url:
        yield Cli(url, capsys)


def test_tenants_are_added_listed_changed_and_removed(cli: Cli) -> None:
    ran = cli("--json", "tenant", "add", "acme", "--limit", "max_concurrent=3", "--limit", "weight=2")
    assert (ran.status, ran.json["limits"]["max_concurrent"], ran.json["effective"]["weight"]) == (0, 3, 2.0)
    assert "max_concurrent=3" in cli("tenant", "ls").out
    changed = cli("--json", "tenant", "set", "acme", "--limit", "max_concurrent=").json
    assert (changed["limits"]["max_concurrent"], changed["limits"]["weight"]) == (None, 2.0)
    assert cli("tenant", "set", "acme", "--limit", "speed=3").status == 2
    assert cli("tenant", "set", "acme", "--limit", "weight=much").status == 2
    assert cli("tenant", "set", "acme").status == 2
    assert cli("tenant", "rm", "acme").status == 2
    assert cli("tenant", "rm", "acme", "--yes").status == 0
    assert cli("tenant", "rm", "acme", "--yes").status == 1


def test_key_is_shown_once_rotated_and_revoked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("tenant", "add", "acme")
    made = cli("--json", "key", "new", "acme", "--scope", "infer", "--scope", "admin", "--expires-in", "90d").json
    assert made["key"]["scopes"] == ["infer", "admin"]
    assert cli("tenant", "ls").status == 1, "the server is closed now"
    monkeypatch.setenv("LORAFLEET_API_KEY", made["secret"])
    listed = cli("key", "ls", "--tenant", "acme")
    assert made["key"]["key_id"] in listed.out
    assert made["secret"] not in listed.out + cli("--json", "key", "ls").out
    rotate = ("key", "rotate", made["key"]["key_id"], "--overlap", "1h")
    assert cli(*rotate).status == 1, "what expires has no successor for ever"
    successor = cli(*rotate, "--expires-in", "90d").out.strip()
    assert successor.startswith("lf_")
    monkeypatch.setenv("LORAFLEET_API_KEY", successor)
    assert cli("key", "revoke", made["key"]["key_id"]).status == 0
    monkeypatch.setenv("LORAFLEET_API_KEY", made["secret"])
    assert cli("tenant", "ls").status == 1
    refused = cli("key", "revoke", made["secret"])
    assert refused.status == 2
    assert made["secret"] not in refused.out + refused.err
    assert cli("key", "rotate", "0" * 12, "--overlap", "soon").status == 2


def test_callers_are_shown_and_set(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("callers", "alice", "--nobody").status == 0
    assert setup.registry.adapter("alice").callers == ()
    owner = setup.registry.adapter("alice").owner
    assert cli("callers", "alice", "acme", "other").out == f"alice may be called by {owner}, acme, other\n"
    assert cli("callers", "alice", "--everybody").out == "alice may be called by everybody\n"
    assert cli("callers", "alice", "acme", "--nobody").status == 2
    assert cli("--json", "callers", "alice").json["callers"] == ["*"]


def test_first_key_is_made_in_the_database(
    cli: Cli, setup: TwoReplicas, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(setup.registry.config.data_dir)
    where = ["--data-dir", folder]
    if setup.registry.config.database_url is not None:
        where += ["--database-url", setup.registry.config.database_url]
    assert main(["key", "bootstrap", *where]) == 0
    secret = capsys.readouterr().out.strip()
    assert cli("tenant", "ls").status == 1
    monkeypatch.setenv("LORAFLEET_API_KEY", secret)
    assert "admin" in cli("tenant", "ls").out
    (key,) = setup.registry.tenants.keys()
    assert (key.note, set(key.scopes)) == ("bootstrap", set(Scope))
    assert main(["key", "bootstrap", "--data-dir", folder + "-nowhere"]) == 2
