"""What was acknowledged survives kill -9, and writers in several processes and threads never collide."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from registry.service import Registry
from registry.types import PushResult, VersionState
from tests.registry.uploads import make_base, open_registry, plain_upload

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("backend")
BASE = make_base()


def _start(folder: Path, first_seed: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.registry.pusher", str(folder), str(first_seed)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _kill_after(child: "subprocess.Popen[str]", num_acks: int) -> list[tuple[int, str]]:
    """Acknowledgements that arrived, the last perhaps while the child was being killed."""
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(num_acks)]
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.readlines()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    whole = [line.split() for line in lines if line.endswith("\n")]
    return [(int(number), digest) for number, digest in whole]


def _assert_stored(registry: Registry, number: int, digest: str) -> None:
    version = registry.adapter("alice").version(number)
    assert version is not None
    assert version.digest == digest
    manifest = registry.manifest(digest)
    data = registry.blobs.read(manifest.blob_sha256, 0, manifest.blob_bytes)
    assert hashlib.sha256(data).hexdigest() == manifest.blob_sha256


def test_nothing_acknowledged_is_lost_by_kill(tmp_path: Path) -> None:
    acknowledged: list[tuple[int, str]] = []
    for round_number, num_acks in enumerate((1, 7, 20)):
        acknowledged += _kill_after(_start(tmp_path, 100_000 * round_number), num_acks)
        registry = open_registry(tmp_path / "data")
        registry.check_integrity()
        for number, digest in acknowledged:
            _assert_stored(registry, number, digest)
        registry.close()
    assert len({number for number, _ in acknowledged}) == len(acknowledged) >= 28


def test_two_processes_pushing_one_name_never_collide(tmp_path: Path) -> None:
    children = [_start(tmp_path, seed) for seed in (0, 100_000)]
    acknowledged = [ack for child in children for ack in _kill_after(child, 10)]
    registry = open_registry(tmp_path / "data")
    registry.check_integrity()
    for number, digest in acknowledged:
        _assert_stored(registry, number, digest)
    assert len({number for number, _ in acknowledged}) == len(acknowledged)
    registry.close()


def test_concurrent_pushes_of_one_name_get_their_own_numbers(tmp_path: Path) -> None:
    registries = [open_registry(tmp_path / "data") for _ in range(2)]
    registries[0].publish_base(BASE, actor="r")
    results: list[PushResult] = []

    def push(seed: int) -> None:
        files = plain_upload(tmp_path / str(seed), BASE, seed % 8)
        results.append(registries[seed % 2].push("alice", files, owner="o"))

    threads = [threading.Thread(target=push, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.version.number for r in results) == sorted([*range(1, 9), *range(1, 9)])
    assert sum(r.created for r in results) == 8
    assert len({(r.version.number, r.version.digest) for r in results}) == 8
    registries[0].check_integrity()
    for registry in registries:
        registry.close()


def test_two_registries_that_advance_at_once_flip_once(tmp_path: Path) -> None:
    registries = [open_registry(tmp_path / "data") for _ in range(2)]
    registries[0].publish_base(BASE, actor="r")
    digest = registries[0].push("alice", plain_upload(tmp_path / "u", BASE), owner="o").version.digest
    registries[1].join_replica(replica_id="r", node_id="n", num_slots=1, base_digest=BASE.digest, staged=[digest])
    registries[1].renew_replica("r", revision=0, staged=[digest], held=[digest])
    moved: list[bool] = []
    threads = [threading.Thread(target=lambda r=r: moved.append(r.advance())) for r in registries * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == [False] * 7 + [True]
    assert [event.kind for event in registries[0].events(0)].count("alias_moved") == 1
    for registry in registries:
        registry.close()


def test_registries_that_open_a_new_folder_at_once_agree(tmp_path: Path) -> None:
    opened: list[Registry] = []
    threads = [threading.Thread(target=lambda: opened.append(open_registry(tmp_path / "data"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 6
    assert {registry.publish_base(BASE, actor="r") for registry in opened} == {1}
    for registry in opened:
        registry.close()


def _churn(folder: Path, seed: int, lives_s: float) -> list[dict[str, Any]]:
    """What a churner acknowledged until it was killed after that time."""
    command = [sys.executable, "-m", "tests.registry.churner", str(folder), str(seed)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = [child.stdout.readline()]
    killer = threading.Timer(lives_s, child.kill)
    killer.start()
    lines += child.stdout.readlines()
    killer.join()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _check_acknowledged(registry: Registry, said: list[dict[str, Any]]) -> None:
    """Every acknowledged version is there under its number, with its bytes unless it was collected since."""
    record = registry.adapter("alice")
    for line in said:
        assert record.revision >= line.get("revision", 0)
        if line["kind"] == "pushed":
            version = record.version(line["number"])
            assert version is not None
            assert version.digest == line["digest"]
    for version in record.versions:
        if version.state is not VersionState.COLLECTED:
            manifest = registry.manifest(version.digest)
            data = registry.blobs.read(manifest.blob_sha256, 0, manifest.blob_bytes)
            assert hashlib.sha256(data).hexdigest() == manifest.blob_sha256


@pytest.mark.soak
def test_thirty_kills_amid_uploads_activations_rollbacks_and_collections_lose_nothing(tmp_path: Path) -> None:
    _kill_often(tmp_path, 30)


def test_kills_amid_uploads_activations_rollbacks_and_collections_lose_nothing(tmp_path: Path) -> None:
    _kill_often(tmp_path, 3)


def _kill_often(folder: Path, times: int) -> None:
    source, said = random.Random(times), []
    for seed in range(times):
        said += _churn(folder, seed, source.uniform(0.05, 1.0))
        registry = open_registry(folder / "data", time.time)
        registry.check_integrity()
        _check_acknowledged(registry, said)
        registry.close()
    assert {"pushed", "live", "collect"} <= {line["kind"] for line in said}
