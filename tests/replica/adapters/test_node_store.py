"""The node store: checked bytes, one fetch among many, a byte budget, and readers that are never robbed."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from replica.adapters.image_reader import ImageReader
from replica.adapters.node_store import FolderSource, NodeStore
from replica.adapters.weights import plan_layout
from replica.errors import AdapterTooLarge, AdapterUnavailable, UnknownAdapter
from tests.replica.adapters.made import SITES, DictSource, Made, make_adapter

ONE, TWO, THREE = (make_adapter(seed) for seed in (1, 2, 3))
SIZE = ONE.manifest.blob_bytes
ROOT = Path(__file__).parents[3]


def make_store(folder: Path, *adapters: Made, max_bytes: int = 10 * SIZE) -> tuple[NodeStore, DictSource]:
    source = DictSource(*adapters)
    return NodeStore(folder, source, max_bytes), source


def test_stage_puts_checked_bytes_in_place_once(tmp_path: Path) -> None:
    store, source = make_store(tmp_path, ONE)
    path = store.stage(ONE.manifest)
    assert path.read_bytes() == ONE.blob
    assert store.stage(ONE.manifest) == path
    assert source.num_fetches == 1
    assert store.staged() == (ONE.digest,)
    assert store.manifest(ONE.digest) == ONE.manifest
    assert store.num_bytes == SIZE


def test_stage_survives_a_new_store_on_the_same_folder(tmp_path: Path) -> None:
    make_store(tmp_path, ONE)[0].stage(ONE.manifest)
    store, source = make_store(tmp_path)
    assert store.staged() == (ONE.digest,)
    assert store.open(ONE.digest).read_bytes() == ONE.blob
    assert source.num_fetches == 0


@pytest.mark.parametrize("blob", [b"", ONE.blob[:-1], bytes([ONE.blob[0] ^ 1]) + ONE.blob[1:]])
def test_stage_refuses_bytes_that_differ_and_leaves_nothing(tmp_path: Path, blob: bytes) -> None:
    store, source = make_store(tmp_path)
    source.blobs[ONE.manifest.blob_sha256] = blob
    with pytest.raises(AdapterUnavailable, match=ONE.digest):
        store.stage(ONE.manifest)
    assert store.staged() == store.known() == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_stage_heals_bytes_that_rotted(tmp_path: Path) -> None:
    store, source = make_store(tmp_path, ONE)
    store.stage(ONE.manifest).write_bytes(b"rot")
    assert store.stage(ONE.manifest).read_bytes() == ONE.blob
    assert source.num_fetches == 2


def test_failed_fetch_is_unavailable_and_can_be_repeated(tmp_path: Path) -> None:
    store, source = make_store(tmp_path)
    with pytest.raises(AdapterUnavailable, match="could not be fetched"):
        store.stage(ONE.manifest)
    source.blobs[ONE.manifest.blob_sha256] = ONE.blob
    assert store.stage(ONE.manifest).read_bytes() == ONE.blob


def test_budget_of_one_adapter_holds_it_and_refuses_a_byte_more(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path / "fits", ONE, max_bytes=SIZE)
    store.stage(ONE.manifest)
    store, source = make_store(tmp_path / "not", ONE, max_bytes=SIZE - 1)
    with pytest.raises(AdapterTooLarge, match="node_store_bytes"):
        store.stage(ONE.manifest)
    assert source.num_fetches == 0


def test_least_recently_used_bytes_leave_and_come_back_on_demand(tmp_path: Path) -> None:
    store, source = make_store(tmp_path, ONE, TWO, THREE, max_bytes=2 * SIZE)
    store.stage(ONE.manifest)
    store.stage(TWO.manifest)
    store.open(ONE.digest)
    store.stage(THREE.manifest)
    assert set(store.staged()) == {ONE.digest, THREE.digest}
    assert TWO.digest in store.known()
    assert store.num_bytes == 2 * SIZE
    assert store.num_evictions == 1
    assert store.open(TWO.digest).read_bytes() == TWO.blob
    assert source.num_fetches == 4


def test_bytes_being_read_are_not_evicted(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, ONE, TWO, THREE, max_bytes=2 * SIZE)
    store.stage(ONE.manifest)
    store.stage(TWO.manifest)
    os.utime(store.open(ONE.digest), (0, 0))
    with store.reading(ONE.manifest) as path:
        os.utime(path, (0, 0))
        store.stage(THREE.manifest)
        assert path.read_bytes() == ONE.blob
    assert set(store.staged()) == {ONE.digest, THREE.digest}


def test_stage_waits_for_a_reader_when_nothing_else_can_leave(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, ONE, TWO, max_bytes=SIZE)
    store.stage(ONE.manifest)
    with store.reading(ONE.manifest) as path:
        other = threading.Thread(target=store.stage, args=(TWO.manifest,))
        other.start()
        other.join(0.1)
        assert other.is_alive()
        assert path.read_bytes() == ONE.blob
    other.join(10)
    assert store.staged() == (TWO.digest,)


def read_image(path: Path) -> None:
    sites = {site.path: site for site in SITES}
    ImageReader().read(path, ONE.manifest, plan_layout(ONE.manifest, sites, torch.float32))


def test_changed_bytes_are_never_read_and_fetched_anew_afterwards(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, ONE)
    path = store.stage(ONE.manifest)
    path.write_bytes(ONE.blob[:-4] + b"\0\0\0\1")
    with pytest.raises(AdapterUnavailable, match="changed"), store.reading(ONE.manifest) as path:
        read_image(path)
    assert not store.holds(ONE.digest)
    with store.reading(ONE.manifest) as path:
        assert path.read_bytes() == ONE.blob


def test_remembered_manifest_brings_its_bytes_on_demand(tmp_path: Path) -> None:
    store, source = make_store(tmp_path, ONE)
    store.remember(ONE.manifest)
    assert store.knows(ONE.digest)
    assert not store.holds(ONE.digest)
    assert source.num_fetches == 0
    with store.reading(ONE.manifest) as path:
        assert path.read_bytes() == ONE.blob


def test_forget_drops_manifest_and_bytes(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, ONE)
    store.stage(ONE.manifest)
    store.forget(ONE.digest)
    store.forget(ONE.digest)
    assert store.num_bytes == 0
    with pytest.raises(UnknownAdapter):
        store.open(ONE.digest)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_what_is_no_digest_is_unknown(tmp_path: Path, digest: str) -> None:
    store, _ = make_store(tmp_path, ONE)
    assert not store.knows(digest)
    for use in (store.open, store.manifest, store.forget):
        with pytest.raises(UnknownAdapter):
            use(digest)


def test_damaged_manifest_is_unavailable(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, ONE)
    store.stage(ONE.manifest)
    (tmp_path / "manifests" / f"{ONE.digest}.json").write_text('{"digest": ')
    with pytest.raises(AdapterUnavailable, match="damaged"):
        store.manifest(ONE.digest)


def test_leftovers_of_a_dead_fetch_are_swept(tmp_path: Path) -> None:
    make_store(tmp_path)
    for name in (ONE.digest, f"{ONE.digest}.lock"):
        (tmp_path / "partial" / name).write_bytes(b"half")
    make_store(tmp_path)
    assert list((tmp_path / "partial").iterdir()) == []


def test_folder_source_copies_what_it_locates(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / ONE.manifest.blob_sha256).write_bytes(ONE.blob)
    store = NodeStore(tmp_path / "node", FolderSource(lambda sha256: tmp_path / "blobs" / sha256), SIZE)
    assert store.stage(ONE.manifest).read_bytes() == ONE.blob
    with pytest.raises(AdapterUnavailable):
        store.stage(TWO.manifest)


STAGING_PROCESS = """
import pathlib, sys, time
from registry.types import AdapterManifest
from replica.adapters.node_store import NodeStore

folder = pathlib.Path(sys.argv[1])

class Source:
    def fetch(self, sha256, to):
        print("fetched")
        time.sleep(0.3)
        to.write_bytes((folder / "blob").read_bytes())

manifest = AdapterManifest.model_validate_json((folder / "manifest").read_bytes())
store = NodeStore(folder / "node", Source(), manifest.blob_bytes)
print("ready", flush=True)
sys.stdin.readline()
assert store.stage(manifest).read_bytes() == (folder / "blob").read_bytes()
"""


def test_two_processes_that_stage_one_digest_fetch_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(ONE.blob)
    (tmp_path / "manifest").write_text(ONE.manifest.model_dump_json())
    command = [sys.executable, "-c", STAGING_PROCESS, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outputs) == ["", "fetched\n"]


class MeetingSource(DictSource):
    """A fetch ends only when two of them are under way at once."""

    def __init__(self, *adapters: Made) -> None:
        super().__init__(*adapters)
        self.meeting = threading.Barrier(2)

    def fetch(self, sha256: str, to: Path) -> None:
        self.meeting.wait(20)
        super().fetch(sha256, to)


def test_threads_that_stage_one_digest_fetch_once_and_others_run_beside(tmp_path: Path) -> None:
    source = MeetingSource(ONE, TWO)
    store = NodeStore(tmp_path, source, 2 * SIZE)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(store.stage, [ONE.manifest, TWO.manifest] * 4))
    assert source.num_fetches == 2


def test_room_to_spare_is_known_without_a_look_at_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = NodeStore._oldest_first
    monkeypatch.setattr(NodeStore, "_oldest_first", lambda store: looks.append(1) or look(store))
    store, _ = make_store(tmp_path, ONE, TWO, THREE, max_bytes=2 * SIZE)
    store.stage(ONE.manifest)
    after_the_first = len(looks)
    store.stage(TWO.manifest)
    assert len(looks) == after_the_first > 0
    store.stage(THREE.manifest)
    assert len(looks) > after_the_first
    assert store.staged() == tuple(sorted((TWO.digest, THREE.digest)))
