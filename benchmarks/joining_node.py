"""How long a replica needs to join a registry that has thousands of versions: everything but its engine.

The member and the node store are real, the registry is in this process; nothing computes.

Run: python -m benchmarks.joining_node [--adapters 1000] [--versions 5]
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import save
from benchmarks.registry_scale import BASE, fill
from cluster.member import Member
from registry.config import RegistryConfig
from registry.service import Registry
from registry.types import AdapterManifest, BaseSpec
from replica.adapters.node_store import NodeStore
from tests.local_fleet import LocalRegistry, until

GIB = 1 << 30
PATIENCE_S = 600.0


class Node:
    """`cluster.staging.Stager` over a node store, as `replica.replica.Replica` is one, without a model."""

    def __init__(self, store: NodeStore) -> None:
        self.store = store

    async def stage(self, manifest: AdapterManifest) -> None:
        await asyncio.to_thread(self.store.stage, manifest)

    async def remember(self, manifest: AdapterManifest) -> None:
        await asyncio.to_thread(self.store.remember, manifest)

    def warm(self, digest: str) -> None:
        """There is no host memory here."""

    def forget(self, digest: str) -> None:
        self.store.forget(digest)

    def staged(self) -> Sequence[str]:
        return self.store.known()

    def held(self) -> Sequence[str]:
        return self.store.staged()

    def resident(self) -> Sequence[str]:
        return ()

    def running(self) -> Sequence[str]:
        return ()

    def is_alive(self) -> bool:
        return True


async def join(registry: Registry, base: BaseSpec, folder: Path, name: str, max_bytes: int) -> dict[str, Any]:
    """One join with the node store in `folder`: seconds until it is a member, and what it then has."""
    local = LocalRegistry(registry)
    node = Node(NodeStore(folder, local, max_bytes))
    member = Member(name, "node", 8, base, b"{}", node, local, 1.0, max_bytes)
    started_s = time.perf_counter()
    running = asyncio.create_task(member.run())
    try:
        await until(lambda: member.is_joined, PATIENCE_S)
        joined_s = time.perf_counter() - started_s
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await member.leave()
    return {"joined_s": round(joined_s, 2), "with_bytes": len(node.held()), "with_manifest": len(node.staged())}


async def measure(registry: Registry, base: BaseSpec, folder: Path, blob_bytes: int) -> dict[str, Any]:
    """An empty node that may hold everything, the same node again, and an empty one that may hold a tenth."""
    num_versions = sum(len(record.versions) for record in registry.adapters())
    tenth = blob_bytes * num_versions // 10
    return {
        "empty_node": await join(registry, base, folder / "all", "joiner-1", GIB),
        "node_that_has_them": await join(registry, base, folder / "all", "joiner-2", GIB),
        "empty_node_with_room_for_a_tenth": await join(registry, base, folder / "tenth", "joiner-3", tenth),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        registry = Registry.open(RegistryConfig(data_dir=folder / "data"))
        fill(registry, folder, options.adapters, options.versions)
        manifest = registry.manifest(registry.adapter("a0000").versions[0].digest)
        results = asyncio.run(measure(registry, BASE, folder, manifest.blob_bytes))
        registry.close()
    for kind, figures in results.items():
        print(f"{kind:35} {figures}")
    conditions = {"adapters": options.adapters, "versions": options.adapters * options.versions, "database": "SQLite"}
    conditions["blob_bytes"] = manifest.blob_bytes
    print(save("joining_node", "How long does a replica take to join 5,000 versions?", conditions, results))


if __name__ == "__main__":
    main()
