"""The blob store, on a folder and on an object store."""

import hashlib
import os
import threading
import uuid
from pathlib import Path

import pytest

from registry.blobs import BlobStore
from registry.errors import BlobNotFound

DATA = b"some bytes that matter" * 100
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(params=["folder", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return BlobStore(str(tmp_path / "blobs") if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def test_bytes_come_back_under_their_digest(blobs: BlobStore) -> None:
    assert blobs.put_bytes(DATA) == SHA
    assert blobs.exists(SHA)
    assert blobs.size(SHA) == len(DATA)
    assert blobs.read(SHA, 0, len(DATA)) == DATA


def test_file_comes_back_under_its_digest(blobs: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    assert blobs.put_file(tmp_path / "file") == SHA
    assert blobs.read(SHA, 0, 1 << 20) == DATA


def test_empty_blob_is_a_blob(blobs: BlobStore) -> None:
    sha256 = blobs.put_bytes(b"")
    assert blobs.size(sha256) == 0
    assert blobs.read(sha256, 0, 10) == b""


def test_putting_twice_changes_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    assert {blobs.put_bytes(DATA), blobs.put_file(tmp_path / "file"), blobs.put_bytes(DATA)} == {SHA}
    assert blobs.read(SHA, 0, len(DATA)) == DATA


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 5), (7, 11), (len(DATA) - 3, 10), (len(DATA), 4), (10**9, 4), (3, 0)]
)
def test_part_of_a_blob_can_be_read(blobs: BlobStore, offset: int, length: int) -> None:
    blobs.put_bytes(DATA)
    assert blobs.read(SHA, offset, length) == DATA[offset : offset + length]


def test_negative_range_is_refused(blobs: BlobStore) -> None:
    blobs.put_bytes(DATA)
    with pytest.raises(ValueError, match="negative"):
        blobs.read(SHA, -1, 4)


@pytest.mark.parametrize("name", ["0" * 64, "../../etc/passwd", "", SHA.upper(), SHA + "/x", SHA + "\n"])
def test_unknown_or_odd_digest_is_not_found(blobs: BlobStore, name: str) -> None:
    assert not blobs.exists(name)
    with pytest.raises(BlobNotFound):
        blobs.read(name, 0, 1)


def test_folder_holds_whole_blobs_only(tmp_path: Path) -> None:
    blobs = BlobStore(str(tmp_path))
    blobs.put_bytes(DATA)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        f"{SHA[:2]}/{SHA}"
    ]


def test_blob_damaged_on_disk_is_replaced_by_the_next_put(tmp_path: Path) -> None:
    blobs = BlobStore(str(tmp_path))
    blobs.put_bytes(DATA)
    (tmp_path / SHA[:2] / SHA).write_bytes(b"cut")
    blobs.put_bytes(DATA)
    assert blobs.read(SHA, 0, len(DATA)) == DATA


def test_what_a_crash_left_behind_is_removed_after_a_day(tmp_path: Path) -> None:
    for name, age_s in (("tmp-old", 100_000), ("tmp-young", 10)):
        (tmp_path / name).write_bytes(b"half")
        stamp = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (stamp, stamp))
    BlobStore(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp-young"]


def test_many_writers_of_one_blob_agree(tmp_path: Path) -> None:
    stores = [BlobStore(str(tmp_path)) for _ in range(8)]
    threads = [threading.Thread(target=store.put_bytes, args=(DATA,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].read(SHA, 0, len(DATA)) == DATA
    assert not list(tmp_path.glob("tmp-*"))


def test_blob_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("sync"), sync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append("rename"), rename(self, target))[1])
    BlobStore(str(tmp_path)).put_bytes(DATA)
    assert events == ["sync", "rename", "sync", "sync"]
