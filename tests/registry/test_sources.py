"""Sources: what is fetched, and that nothing outside the configured roots is ever read."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from registry.config import RegistryConfig
from registry.errors import InvalidAdapter, LimitExceeded, SourceNotFound, SourceRefused, SourceUnavailable
from registry.source_urls import BadUrl, parse_place
from registry.sources import fetched
from registry.types import AdapterSource
from tests.registry.test_archives import zipped
from tests.registry.uploads import make_base, make_config, make_tensors, open_registry, paths_of, plain_upload
from tests.registry.uploads import write_upload as write

BASE = make_base()
COMMIT = "c" * 40
NAMES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    plain_upload(tmp_path / "root" / "sql", BASE)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "adapter_config.json").write_text("{}")
    return tmp_path / "root"


def names(url: str | Path, root: str | Path, revision: str | None = None, **limits: Any) -> set[str]:
    config = RegistryConfig(source_roots=(str(root),), **limits)
    with fetched(AdapterSource(url=str(url), revision=revision), config) as files:
        assert all(path.is_file() for path in files.values())
        return set(files)


def test_folder_under_a_root_is_copied(root: Path) -> None:
    assert names(f"file://{root}/sql", root) == names(root / "sql", root) == names(f"{root}/sql/", root) == NAMES
    assert names(root / "sql", root / "sql") == NAMES


def test_copies_are_deleted_and_the_source_is_left_alone(root: Path) -> None:
    with fetched(AdapterSource(url=str(root / "sql")), RegistryConfig(source_roots=(str(root),))) as files:
        copies = list(files.values())
        assert not any(path.is_relative_to(root) for path in copies)
    assert not any(path.exists() for path in copies)
    assert {path.name for path in (root / "sql").iterdir()} == NAMES


def test_sub_folder_is_taken_and_what_means_nothing_is_left(root: Path) -> None:
    plain_upload(root / "named" / "legal", BASE)
    (root / "named" / "README.md").write_text("card")
    (root / "named" / "optimizer.pt").write_bytes(b"\x80")
    assert names(root / "named", root) == {f"legal/{name}" for name in NAMES}


def test_archive_is_a_source_too(root: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (root / "sql").iterdir()}
    (root / "sql.zip").write_bytes(zipped(files))
    registry = open_registry(tmp_path / "data", source_roots=(str(root),))
    registry.publish_base(BASE, actor="r")
    first = registry.push_source("sql", AdapterSource(url=str(root / "sql.zip")), owner="a")
    again = registry.push_source("sql", AdapterSource(url=str(root / "sql")), owner="a")
    assert (first.created, again.created, first.version) == (True, False, again.version)


@pytest.mark.parametrize(
    "url",
    [
        "/etc",
        "/etc/passwd",
        "file:///etc",
        "{root}/../secret",
        "{root}x",
        "{root}/sql/../../secret",
        "{root}/./sql",
        "relative/path",
        "http://127.0.0.1:8000/x",
        "http://169.254.169.254/latest/meta-data",
        "https://example.com/a.zip",
        "ftp://h/x",
        "s3://other/sql",
        "s3://bucket",
        "S3://bucket/team/sql",
        "s3://bucket/team2",
        "s3://user@bucket/team/sql?versionId=1",
        "s3://bucket/team/../x",
        "simplecache::s3://bucket/team/sql",
        "zip://x::s3://bucket/team/sql",
        "s3://bucket/team/*",
        "s3://bucket/team/sql#x",
        "gs://bucket/team",
        "hf://acme/sql",
        "hf://other/sql",
        "memory://x",
        "local:///etc",
        "file://host/etc",
        "{root}/sql\0",
        "{root}/sql%2e%2e",
        "~/x",
    ],
)
def test_source_outside_the_roots_is_refused_unseen(url: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    config = RegistryConfig(source_roots=(str(root), "s3://bucket/team"))
    source = AdapterSource(url=url.replace("{root}", str(root)), revision=COMMIT if url.startswith("hf") else None)
    with pytest.raises(SourceRefused), fetched(source, config):
        pass


def test_without_roots_nothing_is_a_source(root: Path) -> None:
    with pytest.raises(SourceRefused), fetched(AdapterSource(url=str(root / "sql")), RegistryConfig()):
        pass


def test_link_inside_the_roots_is_followed(root: Path) -> None:
    """As in the hub's cache, where a snapshot is made of links to blobs."""
    (root / "snapshot").mkdir()
    for name in NAMES:
        (root / "snapshot" / name).symlink_to(root / "sql" / name)
    (root / "alias").symlink_to(root / "sql", target_is_directory=True)
    assert names(root / "snapshot", root) == names(root / "alias", root) == NAMES


@pytest.mark.parametrize("target", ["../secret", "../secret/adapter_config.json"])
def test_link_out_of_the_roots_is_refused(root: Path, target: str) -> None:
    (root / "out").symlink_to(root / target)
    with pytest.raises(SourceRefused, match="leads out"):
        names(root / "out", root)
    (root / "mixed").mkdir()
    (root / "mixed" / "adapter_config.json").symlink_to(root / "../secret/adapter_config.json")
    with pytest.raises(SourceRefused, match="leads out"):
        names(root / "mixed", root)


def test_link_put_in_the_way_after_the_check_leads_nowhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.realpath

    def swap(path: Any) -> str:
        found = real(path)
        if str(path).endswith("adapter_config.json") and not (root / "was").exists():
            (root / "sql").rename(root / "was")
            (root / "sql").symlink_to(root / "../secret", target_is_directory=True)
        return found

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises(SourceRefused, match="cannot be opened"):
        names(root / "sql", root)


def test_pipe_is_no_plain_file(root: Path) -> None:
    (root / "pipes").mkdir()
    os.mkfifo(root / "pipes" / "adapter_config.json")
    with pytest.raises(SourceRefused, match="not a plain file"):
        names(root / "pipes", root)


def test_limits_hold_for_sources(root: Path) -> None:
    with pytest.raises(LimitExceeded, match="files"):
        names(root / "sql", root, max_files=1)
    with pytest.raises(LimitExceeded, match="bytes"):
        names(root / "sql", root, max_unpacked_bytes=100)
    with pytest.raises(SourceUnavailable, match="took longer"):
        names(root / "sql", root, source_timeout_s=1e-9)


def test_nothing_there_is_not_found(root: Path) -> None:
    with pytest.raises(SourceNotFound):
        names(root / "nothing", root)


def test_faults_of_a_source_are_those_of_an_upload(root: Path, tmp_path: Path) -> None:
    write(root / "dora", make_config(use_dora=True), make_tensors(BASE, paths_of(BASE, "q_proj")))
    registry = open_registry(tmp_path / "data", source_roots=(str(root),))
    registry.publish_base(BASE, actor="r")
    with pytest.raises(InvalidAdapter, match="use_dora"):
        registry.push_source("x", AdapterSource(url=str(root / "dora")), owner="a")
    assert registry.adapters() == ()


@pytest.mark.parametrize("revision", [None, "main", "v1", "c" * 39, "C" * 40, "c" * 40 + "/x"])
def test_hub_needs_a_commit(revision: str | None) -> None:
    with pytest.raises(SourceRefused, match="full commit hash"):
        names("hf://acme/sql", "hf://acme", revision)


@pytest.mark.parametrize("url", ["hf://acme", "hf://acme/sql@main", f"hf://acme/sql@{COMMIT}"])
def test_hub_source_is_owner_and_repository(url: str) -> None:
    with pytest.raises(SourceRefused, match="owner/repository"):
        names(url, "hf://acme", COMMIT)


def test_revision_belongs_to_the_hub(root: Path) -> None:
    with pytest.raises(SourceRefused, match="revision"):
        names(root / "sql", root, COMMIT)


def test_hub_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match="cannot be read"):
        names("hf://acme/sql", "hf://acme", COMMIT)


def test_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Install s3fs")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(SourceUnavailable, match=r"lorafleet\[s3\]"):
        names("s3://bucket/sql", "s3://bucket")


@pytest.mark.parametrize("root", ["http://h/x", "relative", "s3://", "/a/../b", "s3://b/*", "hf://a@b:c"])
def test_root_that_is_none_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match="no root for sources"):
        RegistryConfig(source_roots=(root,))


def test_root_may_be_the_users_own_folder() -> None:
    assert RegistryConfig(source_roots=("~/adapters",)).source_roots == (str(Path("~/adapters").expanduser()),)
    assert str(parse_place("s3://b/x/")) == "s3://b/x"
    with pytest.raises(BadUrl):
        parse_place("s3:///x")
