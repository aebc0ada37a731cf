"""What does the whole system cost on GPUs? Tokens a second through HTTP against the engine's own, and two replicas.

    python -m benchmarks.gpu_serve --out DIR [--parts engine,fleet] [--max-replicas 2] [--shape tiny --device cpu]

A real fleet of `deploy/serve` (HAProxy, registry, for each GPU a replica and a gateway) over a Llama-3.1-8B shape with
random bf16 weights; adapters of rank 16 on all seven projections are pushed through the control API. 64 streams a
replica, prompt 128, output 256, greedy. The engine alone, configured as a replica, is driven in this process
on the first GPU, before and after the fleets.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fabric import one_stream  # noqa: E402
from benchmarks.gpu_engine import show, where  # noqa: E402
from benchmarks.gpu_fixture import SHAPES, arguments, chosen_parts  # noqa: E402
from benchmarks.gpu_fleet import (  # noqa: E402
    AdapterFolder,
    LinkSource,
    Recorder,
    load_base,
    make_request,
    stage,
    write_json,
)
from cluster.console.client import ControlClient  # noqa: E402
from replica.config import ReplicaConfig  # noqa: E402
from replica.replica import Replica  # noqa: E402
from tests.faults.churn import push  # noqa: E402
from tests.fleet_process import FleetProcess  # noqa: E402

PARTS = ("engine", "fleet")


@dataclass(frozen=True)
class Work:
    """How much is done. `max_num_seqs` is above the streams a replica gets, as placement is not exact."""

    rank: int = 16
    num_adapters: int = 16
    num_streams: int = 64
    num_prompt: int = 128
    num_output: int = 256
    repeats: int = 6
    max_num_seqs: int = 96
    max_batch_tokens: int = 2048
    num_kv_blocks: int = 4096
    image_bytes: int = 90 << 20
    load_factor: float = 1.0
    """All requests come at once and all adapters are resident everywhere: what counts is even load."""


WORKS = {"llama-8b": Work(), "tiny": Work(4, 4, 8, 16, 16, 2, 12, 256, 256, 1 << 20)}


def name_every_token(folder: Path, vocab_size: int) -> None:
    """A tokenizer that has text for whatever the model chooses."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"t{index}" for index in range(len(alphabet), vocab_size))]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))


def replica_fields(folder: Path, shape: str, device: str, work: Work) -> dict[str, Any]:
    """The configuration of a replica, the engine alone and each of the fleet alike."""
    room = work.num_adapters * work.image_bytes
    threads = {"num_threads": 1} if device == "cpu" else {"num_threads": None}
    return {
        "model": {"base": str(folder), "name": shape, "weights": "random", "device": device, **threads},
        "adapters": {
            "max_slots": work.num_adapters,
            "arena_bytes": room,
            "host_bytes": 2 * room,
            "max_rank": work.rank,
            "node_store_bytes": 1 << 40,
        },
        "scheduler": {
            "max_num_seqs": work.max_num_seqs,
            "max_batch_tokens": work.max_batch_tokens,
            "num_kv_blocks": work.num_kv_blocks,
        },
    }


class Bench:
    """The engine alone and the fleet, under the same requests."""

    def __init__(self, folder: Path, shape: str, device: str, work: Work) -> None:
        self.shape, self.device, self.work = shape, device, work
        self.base_folder, self._folder = folder / "base", folder
        self._source, self._random = LinkSource(), random.Random(0)
        self.base = load_base(self.base_folder, shape, device)
        name_every_token(self.base_folder, SHAPES[shape].vocab_size)
        self.adapters = AdapterFolder(folder / "adapters", self.base, work.rank, self._source)
        self.manifests = [self.adapters.make(index) for index in range(work.num_adapters)]
        self.fields = replica_fields(self.base_folder, shape, device, work)

    @contextmanager
    def engine(self) -> Iterator[Replica]:
        """The engine alone, every adapter staged."""
        fields = {**self.fields, "adapters": {**self.fields["adapters"], "node_store": self._folder / "alone"}}
        replica = Replica(
            ReplicaConfig.model_validate(fields),
            self._source,
            model_loader=lambda _: self.base,
            device_memory=lambda _: None,
        )
        replica.load()
        try:
            stage(replica, self.manifests)
            yield replica
        finally:
            replica.close()

    def prompts(self, count: int) -> list[list[int]]:
        vocab, length = self.base.vocab_size, self.work.num_prompt
        return [[self._random.randrange(2, vocab) for _ in range(length)] for _ in range(count)]

    def drive_engine(self, replica: Replica, adapters: Sequence[str | None]) -> float:
        """Output tokens a second."""
        recorder, started_s = Recorder(), time.perf_counter()
        for index, prompt in enumerate(self.prompts(self.work.num_streams)):
            digest = adapters[index % len(adapters)]
            recorder.submit(replica, make_request(f"r{index}", digest, prompt, self.work.num_output))
        recorder.wait()
        return recorder.num_tokens / (time.perf_counter() - started_s)

    def drive_http(self, port: int, names: Sequence[str], num_streams: int) -> float:
        """The same through HTTP."""
        bodies = [
            json.dumps(
                {
                    "model": names[index % len(names)],
                    "prompt": prompt,
                    "max_tokens": self.work.num_output,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode()
            for index, prompt in enumerate(self.prompts(num_streams))
        ]

        async def drive() -> list[int]:
            return await asyncio.gather(*(one_stream(port, body) for body in bodies))

        started_s = time.perf_counter()
        counts = asyncio.run(drive())
        took_s = time.perf_counter() - started_s
        assert counts == [self.work.num_output] * num_streams, counts
        return sum(counts) / took_s

    def push_all(self, url: str) -> list[str]:
        """Upload every adapter as `tenant-N`; returns the names."""
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda index: self._push(url, index), range(self.work.num_adapters)))

    def _push(self, url: str, index: int) -> str:
        folder = self._folder / "pushed" / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "adapter_model.safetensors"
        link.unlink(missing_ok=True)
        os.link(self._folder / "adapters" / f"{index}.safetensors", link)
        (folder / "adapter_config.json").write_text(json.dumps(self._peft_config()))
        with ControlClient(url) as control:
            push(control, f"tenant-{index}", folder, activate=True)
        return f"tenant-{index}"

    def _peft_config(self) -> dict[str, Any]:
        modules = sorted({site.path.rpartition(".")[2] for site in self.base.sites})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.shape,
            "r": self.work.rank,
            "lora_alpha": self.work.rank,
            "target_modules": modules,
            "bias": "none",
        }


def repeated(run: Callable[[], float], repeats: int) -> list[float]:
    """The first run warms up."""
    return [run() for _ in range(repeats + 1)][1:]


def measure(bench: Bench, parts: Sequence[str], max_replicas: int) -> dict[str, list[float]]:
    """Tokens a second of each case, one value a run."""
    found: dict[str, list[float]] = {}
    with bench.engine() if "engine" in parts else nullcontext() as engine:
        if engine is not None:
            found.update(over_engine(bench, engine, "engine"))
        for count in range(1, max_replicas + 1 if "fleet" in parts else 1):
            found.update(over_fleet(bench, count))
        if engine is not None:
            found.update(over_engine(bench, engine, "engine again"))
    return {name: [round(value, 1) for value in values] for name, values in found.items()}


def over_engine(bench: Bench, engine: Replica, name: str) -> dict[str, list[float]]:
    """64 streams on the base and on adapters."""
    cases: dict[str, list[str | None]] = {"base": [None], "adapters": [each.digest for each in bench.manifests]}
    found = {
        f"{name}, {title}": repeated(lambda chosen=chosen: bench.drive_engine(engine, chosen), bench.work.repeats)
        for title, chosen in cases.items()
    }
    print({name: [round(value) for value in values] for name, values in found.items()}, flush=True)
    return found


def over_fleet(bench: Bench, num_replicas: int) -> dict[str, list[float]]:
    """64 streams a replica, on the base and on adapters."""
    started_s, num_streams = time.perf_counter(), num_replicas * bench.work.num_streams
    fleet = {
        "replicas": {"count": num_replicas, "num_gpus": 1 if bench.device == "cuda" else 0},
        "gateways": {"count": num_replicas},
        "router": {"placement": {"load_factor": bench.work.load_factor}},
    }
    with FleetProcess(str(bench.base_folder), num_replicas=num_replicas, replica=bench.fields, fleet=fleet) as running:
        ready_s = time.perf_counter() - started_s
        names = bench.push_all(running.url)
        print(f"{num_replicas} replicas: ready in {ready_s:.1f} s, {len(names)} adapters pushed in "
              f"{time.perf_counter() - started_s - ready_s:.1f} s", flush=True)  # fmt: skip
        found = {}
        for title, models_named in (("base", [bench.shape]), ("adapters", names)):
            found[f"{num_replicas} replica, {title}"] = repeated(
                lambda chosen=models_named: bench.drive_http(running.port, chosen, num_streams), bench.work.repeats
            )
        print({name: [round(value) for value in values] for name, values in found.items()}, flush=True)
        return found


def table(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians, and each case against the engine alone, the mean of before and after, and against one replica."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    engine: dict[str, list[float]] = {}
    for name, value in middle.items():
        if name.startswith("engine"):
            engine.setdefault(name.rpartition(", ")[2], []).append(value)
    rows = []
    for name, value in middle.items():
        title = name.rpartition(", ")[2]
        one = middle.get(f"1 replica, {title}")
        rows.append(
            {
                "case": name,
                "tokens_per_s": round(value, 1),
                "of_engine": round(value / statistics.mean(engine[title]), 4) if title in engine else "",
                "of_one_replica": round(value / one, 4) if one and "replica" in name else "",
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__, PARTS)
    parser.add_argument("--max-replicas", type=int, default=2)
    options = parser.parse_args()
    work = WORKS[options.shape]
    print(where(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options.shape, options.device, work)
        found = measure(bench, chosen_parts(options.parts, PARTS), options.max_replicas)
    rows = show("whole system", table(found))
    record = {"question": __doc__, **where(), "shape": options.shape, "work": asdict(work)}
    write_json(options.out / "gpu_serve.json", {**record, "runs": found, "table": rows})


if __name__ == "__main__":
    main()
