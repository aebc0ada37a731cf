"""Kill -9 of a real fleet's registry and replicas, one after the other, while versions come and go under traffic."""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx

from cluster.console.client import ControlClient
from registry.config import RegistryConfig
from registry.service import Registry
from registry.types import VersionState
from tests.faults.churn import Reader, Worker, Writer, learn, raise_faults, working
from tests.fleet_process import REGISTRY, FleetProcess
from tests.tiny_models import make_adapter

NAMES, NUM_CONTENTS, NUM_READERS = ("alice", "bob", "carol"), 16, 3
SOON = {"keep_versions": 3, "min_age_s": 0, "unused_s": 0, "grace_s": 1}


def make_contents(base: Path, folder: Path) -> list[Path]:
    targets = (("q_proj", "v_proj"), ("k_proj", "o_proj", "up_proj"), ("gate_proj", "down_proj"))
    return [
        make_adapter(base, targets[seed % 3], (4, 8, 16)[seed % 3], folder=folder / f"content-{seed}", seed=seed)
        for seed in range(NUM_CONTENTS)
    ]


def kill_one(fleet: FleetProcess, kind: str, source: random.Random) -> None:
    """Kill a process of that kind and wait until another does its work."""
    before = fleet.pids(kind)
    old = {replica["replica_id"] for replica in fleet.replicas()}
    fleet.kill(source.choice(before))
    if kind == REGISTRY:
        fleet.wait_until(lambda: bool(set(fleet.pids(kind)) - set(before)), "another registry actor")
        listing = f"{fleet.url}/v1/adapters"
        fleet.wait_until(lambda: httpx.get(listing, timeout=60).status_code == 200, "an answer of the registry")
        return
    fleet.wait_until(
        lambda: len(now := {each["replica_id"] for each in fleet.replicas()}) == 2 and bool(now - old),
        "the replacement",
        120.0,
    )


def kill_often(
    fleet: FleetProcess, kinds: Sequence[str], writers: Sequence[Writer], workers: Sequence[Worker]
) -> tuple[Counter[str], list[float]]:
    """What writers were doing at each kill, and how long each took to heal."""
    source, amid, healed_s = random.Random(4), Counter[str](), []
    for kind in source.sample(kinds, len(kinds)):
        sleep(source.uniform(0.3, 2.0))
        amid.update(writer.doing for writer in writers)
        killed_s = monotonic()
        kill_one(fleet, kind, source)
        healed_s.append(monotonic() - killed_s)
        raise_faults(workers)
    return amid, healed_s


def check_stored(fleet: FleetProcess, data: Path) -> int:
    """Every version has its bytes under their digest, and the chain of changes is whole; number of blobs read."""
    fleet.cli("audit", "--verify")
    registry = Registry.open(RegistryConfig(data_dir=data))
    registry.check_integrity()
    checked: set[str] = set()
    for record in registry.adapters():
        for version in record.versions:
            if version.state is not VersionState.COLLECTED:
                manifest = registry.manifest(version.digest)
                assert manifest.digest == version.digest
                data_read = registry.blobs.read(manifest.blob_sha256, 0, manifest.blob_bytes)
                assert hashlib.sha256(data_read).hexdigest() == manifest.blob_sha256
                checked.add(manifest.blob_sha256)
    registry.close()
    return len(checked)


def check_whole(fleet: FleetProcess, writers: Sequence[Writer]) -> None:
    """What writers were promised is what the fleet shows once the trouble is over."""
    control = ControlClient(fleet.url)
    for writer in writers:
        writer.check(control.adapter(writer.adapter))


def tally(writers: Sequence[Writer], readers: Sequence[Reader]) -> dict[str, Any]:
    total: dict[str, Counter[str]] = {"acknowledged": Counter(), "refused": Counter(), "answers": Counter()}
    for writer in writers:
        total["acknowledged"].update(writer.acknowledged)
        total["refused"].update(writer.failures)
    for reader in readers:
        total["answers"].update({"right": reader.answers.right, **reader.answers.by_error})
    return {key: dict(counts) for key, counts in total.items()}


def run(base: Path, folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Start a fleet, load it, kill what `kinds` names in random order, check everything; the figures of the run."""
    folders = make_contents(base, folder)
    with FleetProcess(str(base), registry={"retention": SOON}) as fleet:
        contents = learn(ControlClient(fleet.url), base, folders)
        for number, name in enumerate(NAMES):
            fleet.cli("push", name, str(folders[number]))
        writers = [Writer(fleet.url, name, contents, seed) for seed, name in enumerate(NAMES)]
        readers = [Reader(fleet.url, NAMES, contents, 100 + seed) for seed in range(NUM_READERS)]
        workers = [*writers, *readers]
        with working(workers):
            amid, healed_s = kill_often(fleet, kinds, writers, workers)
        fleet.wait_ready(2)
        check_whole(fleet, writers)
        num_blobs = check_stored(fleet, fleet.folder / "registry")
    killed = {kind.rpartition(":")[2]: kinds.count(kind) for kind in sorted(set(kinds))}
    healed = {"median_s": round(sorted(healed_s)[len(healed_s) // 2], 1), "longest_s": round(max(healed_s), 1)}
    return {
        "killed": killed,
        "amid": dict(amid),
        **tally(writers, readers),
        "blobs_checked": num_blobs,
        "healed": healed,
    }
