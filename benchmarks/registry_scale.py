"""What a registry of 1,000 adapters and 5,000 versions costs: to list, to resolve, to start from, and in memory.

Run: python -m benchmarks.registry_scale [--adapters 1000] [--versions 5]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.provenance import ROOT, save
from registry.catalog import Catalog
from registry.config import RegistryConfig
from registry.service import Registry
from registry.types import Canary
from registry.versions import add_version
from tests.registry.uploads import make_base, plain_upload

BASE = make_base()
RESOLVES, LISTS = 100_000, 20
TARGET_US = 50.0


def fill(registry: Registry, folder: Path, adapters: int, versions: int) -> None:
    """Real uploads for the first adapter; the others get manifests with digests of their own, as uploads would."""
    registry.publish_base(BASE, actor="benchmark")
    files = plain_upload(folder / "upload", BASE, 0)
    result = registry.push("a0000", files, owner="o", activate=False)
    manifest = registry.manifest(result.version.digest)
    for first in range(0, adapters, 50):
        with registry._database.write() as tx:
            for number in range(first, min(first + 50, adapters)):
                for version in range(versions):
                    digest = f"{number * versions + version + 1:064x}"
                    own = manifest.model_copy(update={"digest": digest})
                    add_version(tx, f"a{number:04d}", own, owner="o", keep_manifest=True)
    digests = [version.digest for record in registry.adapters() for version in record.versions]
    registry.join_replica(replica_id="r", node_id="n", num_slots=8, base_digest=BASE.digest, staged=digests)
    for number in range(adapters):
        registry.activate(f"a{number:04d}", "live", versions, actor="o")
    registry.renew_replica("r", revision=10**9, staged=digests, held=digests)
    registry.advance()


def percentiles(samples_s: list[float], unit: float) -> dict[str, float]:
    ordered = sorted(samples_s)
    return {
        "p50": round(statistics.median(ordered) * unit, 3),
        "p99": round(ordered[int(len(ordered) * 0.99)] * unit, 3),
        "max": round(ordered[-1] * unit, 3),
    }


def timed(question: Callable[[int], object], times: int) -> list[float]:
    samples = []
    for number in range(times):
        started_s = time.perf_counter()
        question(number)
        samples.append(time.perf_counter() - started_s)
    return samples


def memory_of_a_gateway(data: Path) -> dict[str, float]:
    """Resident MiB of a fresh process before and after it takes over the catalog."""
    code = (
        "import psutil; from pathlib import Path; from registry.catalog import Catalog;"
        "from registry.config import RegistryConfig; from registry.service import Registry; import router.app;"
        f"registry = Registry.open(RegistryConfig(data_dir=Path({str(data)!r}))); catalog = Catalog([]);"
        "own = psutil.Process(); before = own.memory_info().rss;"
        "import time; started = time.perf_counter(); delta = registry.changes(0); catalog.apply(delta);"
        "took = time.perf_counter() - started; del delta;"
        "print(before / 2**20, own.memory_info().rss / 2**20, took)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after, took_s = map(float, done.stdout.split())
    return {
        "before_mib": round(before, 1),
        "with_catalog_mib": round(after, 1),
        "first_catalog_s": round(took_s, 3),
    }


def measure(folder: Path, adapters: int, versions: int) -> dict[str, object]:
    started_s = time.perf_counter()
    registry = Registry.open(RegistryConfig(data_dir=folder / "data"))
    fill(registry, folder, adapters, versions)
    filled_s = time.perf_counter() - started_s
    catalog = Catalog([])
    catalog.apply(registry.changes(0))  # type: ignore[arg-type]
    names = catalog.names
    assert len(names) == adapters, len(names)
    plain = timed(lambda n: catalog.resolve("t", names[n % adapters]), RESOLVES)
    numbered = timed(lambda n: catalog.resolve("t", f"{names[n % adapters]}@{1 + n % versions}"), RESOLVES)
    for record in catalog.adapters:
        canaries = {"live": Canary(number=1, weight=0.1)}
        catalog._adapters[record.name] = record.model_copy(update={"canaries": canaries})
    sticky = timed(lambda n: catalog.resolve("t", names[n % adapters], f"user-{n}"), RESOLVES)
    revision = catalog.revision
    results = {
        "fill_s": round(filled_s, 1),
        "resolve_us": percentiles(plain, 1e6),
        "resolve_number_us": percentiles(numbered, 1e6),
        "resolve_canary_us": percentiles(sticky, 1e6),
        "list_all_ms": percentiles(timed(lambda _: registry.adapters(), LISTS), 1e3),
        "one_adapter_ms": percentiles(timed(lambda n: registry.adapter(names[n % adapters]), 200), 1e3),
        "whole_catalog_ms": percentiles(timed(lambda _: registry.changes(0), LISTS), 1e3),
        "nothing_new_ms": percentiles(timed(lambda _: registry.changes(revision), 200), 1e3),
        "clock_tick_ms": percentiles(timed(lambda _: registry.advance(), 200), 1e3),
        "collect_dry_run_ms": percentiles(timed(lambda _: registry.collect(actor="b", dry_run=True), 3), 1e3),
        "verify_audit_ms": percentiles(timed(lambda _: registry.check_integrity(), 3), 1e3),
    }
    registry.close()
    opened = timed(lambda _: Registry.open(RegistryConfig(data_dir=folder / "data")).close(), 10)
    return {**results, "open_ms": percentiles(opened, 1e3), "gateway": memory_of_a_gateway(folder / "data")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.adapters, options.versions)
    for name, value in results.items():
        print(f"{name:20} {value}")
    conditions = {"adapters": options.adapters, "versions": options.adapters * options.versions, "database": "SQLite"}
    print(save("registry_scale", "What does a registry of 5,000 versions cost?", conditions, results))


if __name__ == "__main__":
    main()
