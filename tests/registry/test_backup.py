"""Backup and restore: the drill, from and to either database, and every way in which a backup can be broken."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.blobs import BlobStore
from registry.errors import BackupFailed, RegistryError
from registry.service import Registry
from registry.types import VersionState
from tests.registry.two_replicas import BASE, TwoReplicas
from tests.registry.uploads import POSTGRES_VARIABLE, open_registry, plain_upload

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TwoReplicas]:
    setup = TwoReplicas(tmp_path)
    yield setup
    setup.registry.close()


def place(setup: TwoReplicas) -> str:
    return str(setup.folder / "backup")


def fresh(setup: TwoReplicas, name: str = "fresh") -> Registry:
    return open_registry(setup.folder / name, setup.clock)


def test_restored_registry_is_the_one_that_was_backed_up(setup: TwoReplicas) -> None:
    setup.registry.canary("alice", 2, 0.25, actor="a")
    setup.settle()
    setup.registry.activate("alice", "beta", 2, actor="a")
    name, snapshot = setup.registry.backup(place(setup))
    restored = fresh(setup)
    assert restored.restore(place(setup)) == snapshot
    restored.check_integrity()
    assert restored.adapters() == setup.registry.adapters()
    assert restored.base() == BASE
    assert restored.audit(0, 1000) == setup.registry.audit(0, 1000)
    assert restored.replicas() == ()
    for digest in setup.digests:
        manifest = restored.manifest(digest)
        assert restored.blobs.size(manifest.blob_sha256) == manifest.blob_bytes
    assert name == f"r{snapshot.revision:012d}"
    restored.close()


def test_restored_registry_goes_on_where_the_other_was(setup: TwoReplicas) -> None:
    waiting = setup.registry.activate("alice", "beta", 2, actor="a")
    setup.registry.backup(place(setup))
    restored = fresh(setup)
    restored.restore(place(setup))
    restored.join_replica(replica_id="r9", node_id="n", num_slots=1, base_digest=BASE.digest, staged=setup.digests)
    restored.renew_replica("r9", revision=10**6, staged=setup.digests, held=setup.digests)
    restored.advance()
    assert restored.adapter("alice").aliases == {"live": 1, "beta": 2}
    again = restored.activate("alice", "beta", 1, actor="a")
    assert again.activation_id > waiting.activation_id
    files = plain_upload(setup.folder / "u9", BASE, 9)
    assert restored.push("alice", files, owner="o").version.number == 3
    restored.check_integrity()
    restored.close()


def test_backups_of_one_place_share_what_did_not_change(setup: TwoReplicas) -> None:
    first, _ = setup.registry.backup(place(setup))
    before = {path.name for path in (setup.folder / "backup" / "blobs").rglob("*") if path.is_file()}
    setup.push(3)
    second, snapshot = setup.registry.backup(place(setup))
    after = {path.name for path in (setup.folder / "backup" / "blobs").rglob("*") if path.is_file()}
    assert before < after
    assert set(snapshot.blobs) - before == {setup.registry.manifest(setup.digests[2]).blob_sha256}
    for name, count in ((first, 2), (second, 3)):
        restored = fresh(setup, name)
        restored.restore(place(setup), name)
        assert len(restored.adapter("alice").versions) == count
        restored.close()


def test_backup_of_one_kind_of_database_restores_into_the_other(
    setup: TwoReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PostgreSQL as the backend: there, and from there to SQLite; without it, from SQLite to SQLite."""
    setup.registry.backup(place(setup))
    monkeypatch.delenv(POSTGRES_VARIABLE, raising=False)
    restored = fresh(setup)
    restored.restore(place(setup))
    assert restored.adapters() == setup.registry.adapters()
    restored.check_integrity()
    restored.backup(str(setup.folder / "back"))
    monkeypatch.undo()
    again = fresh(setup, "again")
    again.restore(str(setup.folder / "back"))
    assert again.adapters() == setup.registry.adapters()
    for registry in (restored, again):
        registry.close()


def test_collected_versions_are_restored_without_their_bytes(tmp_path: Path) -> None:
    setup = TwoReplicas(tmp_path, retention={"min_age_s": 0, "unused_s": 0, "grace_s": 0})
    setup.registry.retire("alice", 2, actor="a", deadline_s=0)
    setup.settle()
    setup.registry.collect(actor="a")
    _, snapshot = setup.registry.backup(place(setup))
    assert list(snapshot.blobs) == [setup.registry.manifest(setup.digests[0]).blob_sha256]
    restored = fresh(setup)
    restored.restore(place(setup))
    version = restored.adapter("alice").version(2)
    assert version is not None
    assert version.state is VersionState.COLLECTED
    restored.close()
    setup.registry.close()


def test_restore_into_a_registry_that_is_not_empty_is_refused(setup: TwoReplicas) -> None:
    setup.registry.backup(place(setup))
    before = setup.registry.adapters()
    with pytest.raises(BackupFailed, match="not empty"):
        setup.registry.restore(place(setup))
    assert setup.registry.adapters() == before


def test_restore_of_a_snapshot_that_is_not_there_is_refused(setup: TwoReplicas) -> None:
    restored = fresh(setup)
    for name in (None, "r000000000001"):
        with pytest.raises(BackupFailed, match="no snapshot"):
            restored.restore(place(setup), name)
    restored.close()


def test_every_broken_file_of_a_backup_is_found_and_nothing_is_restored(setup: TwoReplicas) -> None:
    setup.registry.backup(place(setup))
    files = sorted(path for path in (setup.folder / "backup").rglob("*") if path.is_file())
    assert len(files) > 8
    for number, path in enumerate(files):
        good = path.read_bytes()
        for bad in (good[:-1], bytes([good[0] ^ 1]) + good[1:]):
            path.write_bytes(bad)
            restored = fresh(setup, f"broken{number}")
            with pytest.raises(RegistryError):
                restored.restore(place(setup))
            assert restored.adapters() == ()
            restored.close()
        path.write_bytes(good)
    restored = fresh(setup, "whole")
    restored.restore(place(setup))
    restored.close()


def test_snapshot_that_is_forged_as_a_whole_is_found_by_its_chain(setup: TwoReplicas) -> None:
    """Rows that were changed and stored under a digest of their own still have to be in the chain."""
    name, snapshot = setup.registry.backup(place(setup))
    blobs = setup.folder / "backup" / "blobs"
    (piece,) = snapshot.tables["events"]
    rows = (blobs / piece[:2] / piece).read_bytes()

    forged = BlobStore(str(blobs)).put_bytes(rows.replace(b'"actor":"o"', b'"actor":"x"', 1))
    changed = json.loads((setup.folder / "backup" / "snapshots" / f"{name}.json").read_text())
    changed["tables"]["events"] = [forged]
    (setup.folder / "backup" / "snapshots" / f"{name}.json").write_text(json.dumps(changed))
    restored = fresh(setup)
    with pytest.raises(RegistryError, match="audit log"):
        restored.restore(place(setup))
    assert restored.adapters() == ()
    restored.close()


def test_backup_with_a_missing_blob_fails_and_writes_no_snapshot(setup: TwoReplicas) -> None:
    setup.registry.blobs.delete(setup.registry.manifest(setup.digests[0]).blob_sha256)
    with pytest.raises(BackupFailed, match="missing"):
        setup.registry.backup(place(setup))
    assert not (setup.folder / "backup" / "snapshots").exists()


def test_backup_to_an_object_store(setup: TwoReplicas) -> None:
    setup.registry.backup("memory://lorafleet-backup")
    restored = open_registry(setup.folder / "fresh", setup.clock, blobs_url="memory://lorafleet-blobs")
    restored.restore("memory://lorafleet-backup")
    restored.check_integrity()
    assert restored.adapters() == setup.registry.adapters()
    restored.close()
