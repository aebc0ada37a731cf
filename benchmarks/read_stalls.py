"""What does reading an adapter take from the steps beside it? By threads of this process, and by processes.

    python -m benchmarks.read_stalls [--rounds 5] [--duration-s 4]

The host's part of a decode step, imitated: 60 small operations that each let go of the interpreter's lock and take it
again, then 4 ms in which the device would compute. Beside it adapters of rank 16 on all projections of
Llama-3.1-8B (84 MB, 448 tensors, page cache warm) are read one after the other, 50 ms between them.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_fixture import SHAPES
from benchmarks.gpu_fleet import AdapterFolder, LinkSource
from benchmarks.provenance import save
from registry.types import AdapterManifest, ModuleKind
from replica.adapters.fit import Budgets, ImagePlanner
from replica.adapters.host_memory import HostMemory
from replica.adapters.image_reader import ImageReader
from replica.adapters.loader import Reader
from replica.adapters.read_process import ReadProcesses
from replica.model.batch import Site

RANK, NUM_ADAPTERS = 16, 3
NUM_OPERATIONS = 60
DEVICE_S, PAUSE_S = 0.004, 0.05


@dataclass(frozen=True)
class Base:
    """What an adapter's files are made from."""

    sites: tuple[Site, ...]
    dtype: torch.dtype = torch.bfloat16


def llama() -> Base:
    """The projections of its decoder layers, without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES["llama-8b"].config()))
    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = [(path, module.in_features, module.out_features) for path, module in linear if ".layers." in path]
    return Base(tuple(Site(index, *place, ModuleKind.LINEAR) for index, place in enumerate(inside)))


class Loads:
    """Adapters that are read again and again, as the loader does it: parse the manifest, plan, read into its place."""

    def __init__(self, folder: Path, base: Base) -> None:
        files = AdapterFolder(folder, base, RANK, LinkSource())  # type: ignore[arg-type]
        manifests = [files.make(index) for index in range(NUM_ADAPTERS)]
        self._texts = [manifest.model_dump_json() for manifest in manifests]
        self._paths = [folder / f"{index}.safetensors" for index in range(NUM_ADAPTERS)]
        self._planner = ImagePlanner(base.sites, base.dtype, Budgets(RANK, 1 << 40, 1 << 40, 1 << 40))
        self.num_bytes = self._planner.plan(manifests[0]).num_bytes
        self.memory = HostMemory(self.num_bytes, pin=False, share=True)
        block = self.memory.allocate(self.num_bytes)
        assert block is not None
        self._block = block

    def read(self, reader: Reader, index: int) -> None:
        manifest = AdapterManifest.model_validate_json(self._texts[index % NUM_ADAPTERS])
        layout = self._planner.plan(manifest)
        reader.read(self._paths[index % NUM_ADAPTERS], manifest, layout, self._block)

    @contextmanager
    def beside(self, reader: Reader | None) -> Iterator[list[float]]:
        """Inside, adapters are read; the list has the milliseconds that each took."""
        took_ms: list[float] = []
        is_over = threading.Event()

        def read_all(reader: Reader) -> None:
            while not is_over.wait(PAUSE_S):
                started_s = time.perf_counter()
                self.read(reader, len(took_ms))
                took_ms.append(1e3 * (time.perf_counter() - started_s))

        if reader is None:
            yield took_ms
            return
        thread = threading.Thread(target=read_all, args=(reader,))
        thread.start()
        try:
            yield took_ms
        finally:
            is_over.set()
            thread.join()


def host_parts_ms(duration_s: float) -> list[float]:
    """Milliseconds of the host's part of each step."""
    small, found = torch.zeros(8), []
    end_s = time.perf_counter() + duration_s
    while time.perf_counter() < end_s:
        time.sleep(DEVICE_S)
        started_s = time.perf_counter()
        for _ in range(NUM_OPERATIONS):
            small.add_(1)
        found.append(1e3 * (time.perf_counter() - started_s))
    return found


def measure(
    loads: Loads, readers: Sequence[tuple[str, Reader | None]], rounds: int, duration_s: float
) -> list[dict[str, object]]:
    """Round by round, each reader in turn."""
    parts_ms: dict[str, list[float]] = {name: [] for name, _ in readers}
    reads_ms: dict[str, list[float]] = {name: [] for name, _ in readers}
    for _ in range(rounds):
        for name, reader in readers:
            with loads.beside(reader) as took_ms:
                parts_ms[name] += host_parts_ms(duration_s)
            reads_ms[name] += took_ms
    return [{"read by": name, **_summary(parts_ms[name], reads_ms[name])} for name, _ in readers]


def _summary(parts_ms: list[float], reads_ms: list[float]) -> dict[str, object]:
    cuts = statistics.quantiles(parts_ms, n=100)
    return {
        "steps": len(parts_ms),
        "host_ms_mean": round(statistics.mean(parts_ms), 3),
        "host_ms_p90": round(cuts[89], 3),
        "host_ms_p99": round(cuts[98], 3),
        "loads": len(reads_ms),
        "load_ms_median": round(statistics.median(reads_ms), 1) if reads_ms else None,
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration-s", type=float, default=4.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = llama()
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        loads = Loads(Path(name), base)
        threads = opened.enter_context(closing(ImageReader(8)))
        opened.callback(loads.memory.close)
        processes = opened.enter_context(closing(ReadProcesses(base.sites, base.dtype, 8, loads.memory)))
        readers: tuple[tuple[str, Reader | None], ...] = (
            ("nobody", None),
            ("one thread", ImageReader(1)),
            ("8 threads", threads),
            ("8 processes", processes),
        )
        rows = measure(loads, readers, options.rounds, options.duration_s)
    for row in rows:
        print(row)
    save("read_stalls", __doc__, vars(options), rows)


if __name__ == "__main__":
    main()
