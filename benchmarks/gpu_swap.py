"""What does it cost that an adapter is not in a slot? First tokens, few slots, gaps between tokens, 1,000 adapters.

    python -m benchmarks.gpu_swap --out DIR [--parts ttft,slots,gaps,scale] [--shape tiny --device cpu]

A whole replica over a Llama-3.1-8B shape with random bf16 weights; adapters of rank 16 on all seven projections (or as
`--set rank=` and `--modules` say), real files in a real node store. Parts: `ttft` one request alone, its adapter
resident, in the host cache, on the node's disk; `slots` many adapters over few slots against all resident; `gaps`
between tokens while others swap; `scale` the S-LoRA workload (alpha 1, cv 1) with 5 and with 1,000 adapters at 1.2 x
the 5-adapter capacity, with a host cache that is full from the start.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import raw_disk  # noqa: E402
from benchmarks.gpu_engine import show, where  # noqa: E402
from benchmarks.gpu_fixture import arguments, chosen_parts  # noqa: E402
from benchmarks.gpu_fleet import (  # noqa: E402
    AdapterFolder,
    Budget,
    LinkSource,
    Recorder,
    describe,
    evict_pages,
    load_base,
    make_request,
    running,
    stage,
    stored_file,
    twin,
    write_json,
)
from registry.types import AdapterManifest  # noqa: E402
from replica.model.base_model import BaseModel  # noqa: E402
from replica.replica import Replica  # noqa: E402

PARTS = ("ttft", "slots", "gaps", "scale")
VLLM_ADDED_MS = {"host": 17.5, "disk warm": 140.0}
TARGET_ADDED_MS = {"host": 4.0, "disk warm": 45.0, "disk evicted": 60.0}
FIRST_TOKEN_LIMIT_S = 6.0
FILL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Work:
    """How much is done."""

    rank: int = 16
    num_adapters: int = 32
    num_slots: int = 8
    max_num_seqs: int = 64
    num_prompt: int = 128
    num_output: int = 256
    num_probes: int = 24
    per_adapter: int = 8
    num_streams: int = 32
    num_few: int = 5
    num_many: int = 1000
    num_scale_requests: int = 400
    shortest: int = 8
    longest: int = 512
    scale_slots: int = 64
    scale_host: int = 192


WORKS = {
    "llama-8b": Work(),
    "tiny": Work(4, 8, 2, 8, 16, 16, 4, 4, 4, 2, 40, 24, 4, 24, 8, 16),
}


class Fleet:
    """The base, its adapters on disk, and replicas over them one after the other."""

    def __init__(self, folder: Path, base: BaseModel, work: Work, modules: Sequence[str] = ()) -> None:
        self.base, self.work = base, work
        self.store, self._source = folder / "node", LinkSource()
        self.adapters = AdapterFolder(folder / "adapters", base, work.rank, self._source, modules)
        self.manifests = [self.adapters.make(index) for index in range(work.num_adapters)]
        self._random = random.Random(0)

    def run(self, budget: Budget, part: Callable[["Fleet", Replica], Any], many: int = 0) -> Any:
        """One part over a replica of its own, with every adapter staged and, if it has room for all, resident."""
        with running(self.base, budget, self.adapters, self.store, self._source) as replica:
            stage(replica, [*self.manifests, *self.twins(many)])
            self.generate(replica, [None, *self.digests[: budget.arena]], 4)
            result = part(self, replica)
            replica.check_integrity()
            return result

    @property
    def digests(self) -> list[str]:
        return [manifest.digest for manifest in self.manifests]

    def twins(self, count: int) -> list[AdapterManifest]:
        """Versions beyond those with bytes of their own."""
        extra = range(len(self.manifests), count)
        return [twin(self.manifests[index % len(self.manifests)], f"twin{index}") for index in extra]

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(2, self.base.vocab_size) for _ in range(length)]

    def generate(self, replica: Replica, adapters: Sequence[str | None], num_output: int) -> tuple[Recorder, float]:
        """One request for each of `adapters`, all at once; the times and the seconds it took."""
        recorder, started_s = Recorder(), time.perf_counter()
        for index, adapter in enumerate(adapters):
            recorder.submit(replica, make_request(f"r{index}", adapter, self.prompt(self.work.num_prompt), num_output))
        recorder.wait()
        return recorder, time.perf_counter() - started_s

    def throughput(self, replica: Replica, adapters: Sequence[str | None]) -> float:
        """Output tokens a second."""
        recorder, took_s = self.generate(replica, adapters, self.work.num_output)
        return recorder.num_tokens / took_s


def first_tokens(fleet: Fleet, replica: Replica) -> list[dict[str, Any]]:
    """Milliseconds to the first token of a request that is alone, by where its adapter is."""
    cases: dict[str, Callable[[str], None]] = {
        "resident": lambda digest: None,
        "host": lambda digest: None,
        "disk warm": lambda digest: replica._cache._host.forget(digest),
        "disk evicted": lambda digest: _evict(fleet, replica, digest),
    }
    medians, rows = dict[str, float](), []
    for name, before in cases.items():
        times, loads = _probe(fleet, replica, before, resident=name == "resident")
        medians[name] = statistics.median(times) * 1e3
        added = medians[name] - medians["resident"]
        rows.append(
            {
                "adapter is": name,
                "first_token_ms": round(medians[name], 2),
                "p90_ms": round(sorted(times)[int(0.9 * len(times))] * 1e3, 2),
                "added_ms": round(added, 2),
                "target_ms": TARGET_ADDED_MS.get(name, ""),
                "vllm_ms": VLLM_ADDED_MS.get(name, ""),
                **loads,
            }
        )
    return rows


def _evict(fleet: Fleet, replica: Replica, digest: str) -> None:
    replica._cache._host.forget(digest)
    evict_pages(stored_file(fleet.store, digest))


def _probe(
    fleet: Fleet, replica: Replica, before: Callable[[str], None], resident: bool
) -> tuple[list[float], dict[str, Any]]:
    """Times of requests one after the other, and the mean milliseconds of each stage of their loads."""
    digests = fleet.digests[-1:] if resident else fleet.digests
    for digest in digests:
        fleet.generate(replica, [digest], 1)
    seen, times = replica._cache.stats(), list[float]()
    for turn in range(fleet.work.num_probes):
        order = digests[turn % len(digests) :] + digests
        digest = order[0] if resident else next(each for each in order if each not in replica.resident())
        before(digest)
        recorder, _ = fleet.generate(replica, [digest], 1)
        times.append(recorder.times["r0"].first_s)
    now = replica._cache.stats()
    loads = {f"{tier}_loads": now.loads[tier] - seen.loads[tier] for tier in ("host", "node")}
    return times, {**loads, **_stage_means(seen.load_seconds, now.load_seconds)}


def _stage_means(before: Any, after: Any) -> dict[str, float]:
    means = {}
    for stage_name in ("read", "convert", "wait", "copy", "publish"):
        num, seconds = (new - old for new, old in zip(after[stage_name], before[stage_name], strict=True))
        means[f"{stage_name}_ms"] = round(1e3 * seconds / num, 2) if num else 0.0
    return means


def slot_loads(fleet: Fleet) -> dict[str, list[str]]:
    """The adapters of the requests: several for each adapter, vLLM's two, and two for as many as there are slots."""
    work = fleet.work
    order = [digest for digest in fleet.digests for _ in range(work.per_adapter)]
    random.Random(1).shuffle(order)
    two_each = [digest for digest in fleet.digests for _ in range(2)]
    return {"many": order, "two": two_each, "few": fleet.digests[: work.num_slots] * 2}


def all_slots(fleet: Fleet, replica: Replica) -> dict[str, float]:
    """Output tokens a second with every adapter resident."""
    return {name: fleet.throughput(replica, load) for name, load in slot_loads(fleet).items()}


def few_slots(fleet: Fleet, replica: Replica) -> dict[str, float]:
    """The same over few slots, without patience and with."""
    loads, admission = slot_loads(fleet), replica.engine._admission
    found = {name: fleet.throughput(replica, loads[name]) for name in ("many", "two")}
    admission._patience_s = 60.0
    found["patient"] = fleet.throughput(replica, loads["many"])
    admission._patience_s = 0.0
    return found


def compare_slots(work: Work, resident: dict[str, float], swapped: dict[str, float]) -> list[dict[str, Any]]:
    """Few slots against all resident, and vLLM's case against what its rows allow."""
    num_many, num_two = work.num_adapters * work.per_adapter, work.num_adapters * 2
    table = (
        (f"{num_many} requests, {work.per_adapter} each, all resident", resident["many"], resident["many"]),
        (f"the same over {work.num_slots} slots (at least 0.75)", swapped["many"], resident["many"]),
        ("the same with adapter_patience_s 60", swapped["patient"], resident["many"]),
        (f"{num_two} requests, 2 each, all resident", resident["two"], resident["two"]),
        (f"the same over {work.num_slots} slots (vLLM: 0.14 of its base)", swapped["two"], resident["two"]),
        (f"... against a batch of {2 * work.num_slots} rows, all resident", swapped["two"], resident["few"]),
    )
    return [
        {"case": name, "tokens_per_s": round(value, 1), "ratio": round(value / against, 4)}
        for name, value, against in table
    ]


def gaps(fleet: Fleet, replica: Replica) -> list[dict[str, Any]]:
    """Gaps between the tokens of streams on half of the slots while other requests come, with swaps and without."""
    half = max(1, fleet.work.num_slots // 2)
    steady, resident, swapped = fleet.digests[:half], fleet.digests[half : 2 * half], fleet.digests[half:]
    fleet.generate(replica, [*steady, *resident], 4)
    fill_host(replica, fleet.digests)
    cases: tuple[tuple[str, Sequence[str], Callable[[str], None]], ...] = (
        ("no swap", resident, lambda digest: None),
        ("swaps from host memory", swapped, lambda digest: None),
        ("swaps from disk", swapped, replica._cache._host.forget),
        ("no swap again", resident, lambda digest: None),
    )
    rows = []
    for name, others, before in cases:
        seen = replica.status().num_adapter_loads
        found = sorted(_gaps_while(fleet, replica, steady, others, before))
        rows.append(
            {
                "others": name,
                "loads": replica.status().num_adapter_loads - seen,
                "gaps": len(found),
                **{f"p{percent}_ms": round(_percentile(found, percent) * 1e3, 3) for percent in (50, 99)},
                "max_ms": round(found[-1] * 1e3, 3),
            }
        )
    base_ms = min(rows[0]["p99_ms"], rows[-1]["p99_ms"])
    return [{**row, "p99_ratio": round(row["p99_ms"] / base_ms, 3)} for row in rows]


def _gaps_while(
    fleet: Fleet, replica: Replica, steady: Sequence[str], others: Sequence[str], before: Callable[[str], None]
) -> list[float]:
    """The others come one after the other, as long as the streams run; `before` is told each one's adapter first."""
    work, streams = fleet.work, Recorder()
    for index in range(work.num_streams):
        prompt = fleet.prompt(work.num_prompt)
        streams.submit(replica, make_request(f"s{index}", steady[index % len(steady)], prompt, 2 * work.num_output))
    turn = 0
    while streams._open:
        other = others[turn % len(others)]
        before(other)
        fleet.generate(replica, [other], 4)
        turn += 1
    streams.wait()
    skipped = work.num_output // 4
    return [
        later - earlier for times in streams.times.values() for earlier, later in pairwise(times.tokens_s[skipped:])
    ]


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def fill_host(replica: Replica, digests: Sequence[str]) -> None:
    """Read adapters until the host cache is full, as when a replica has served for a while. Raises TimeoutError."""
    started_s, host = time.perf_counter(), replica._cache._host
    for digest in digests:
        replica.warm(digest)
    while len(host.digests()) < len(digests) and host.free_bytes >= replica._cache.image_bytes(digests[0]):
        if time.perf_counter() - started_s > FILL_TIMEOUT_S:
            raise TimeoutError(f"the host cache is not full after {FILL_TIMEOUT_S:g} s: {host}")
        time.sleep(0.1)
    print(f"{len(host.digests())} adapters in host memory after {time.perf_counter() - started_s:.1f} s", flush=True)


def scale(fleet: Fleet, replica: Replica) -> list[dict[str, Any]]:
    """The S-LoRA workload with few adapters and with many: throughput and first-token attainment.

    The host cache is full from the start, with all adapters if it has room for them.
    """
    work = fleet.work
    every = [*fleet.digests, *(manifest.digest for manifest in fleet.twins(work.num_many))]
    fill_host(replica, every)
    closed = _scale_requests(fleet, every[: work.num_few], rate=float("inf"))
    _, took_s = _replay(replica, closed)
    rate = 1.2 * len(closed) / took_s
    rows = []
    for count in (work.num_few, work.num_many):
        before = replica.status().num_adapter_loads
        recorder, took_s = _replay(replica, _scale_requests(fleet, every[:count], rate))
        first = [times.first_s for times in recorder.times.values()]
        rows.append(
            {
                "adapters": count,
                "arrivals_per_s": round(rate, 2),
                "requests_per_s": round(len(first) / took_s, 3),
                "tokens_per_s": round(recorder.num_tokens / took_s, 1),
                "attainment_6s": round(sum(value <= FIRST_TOKEN_LIMIT_S for value in first) / len(first), 4),
                "first_token_p50_s": round(statistics.median(first), 3),
                "loads": replica.status().num_adapter_loads - before,
            }
        )
    return [{**row, "ratio": round(row["requests_per_s"] / rows[0]["requests_per_s"], 4)} for row in rows]


def _scale_requests(fleet: Fleet, adapters: Sequence[str], rate: float) -> list[tuple[float, Any]]:
    """Requests with the second of their arrival: adapter floor(n u), Poisson, both lengths U[shortest, longest)."""
    work, draw = fleet.work, random.Random(2)
    found, now_s = [], 0.0
    for index in range(work.num_scale_requests):
        now_s += draw.expovariate(1.0) / rate
        adapter = adapters[int(draw.random() * len(adapters))]
        prompt = fleet.prompt(draw.randrange(work.shortest, work.longest))
        num_output = draw.randrange(work.shortest, work.longest)
        found.append((now_s, make_request(f"r{index}", adapter, prompt, num_output)))
    return found


def _replay(replica: Replica, requests: Sequence[tuple[float, Any]]) -> tuple[Recorder, float]:
    recorder, started_s = Recorder(), time.perf_counter()
    for arrives_s, request in requests:
        time.sleep(max(0.0, started_s + arrives_s - time.perf_counter()))
        recorder.submit(replica, request)
    recorder.wait(600.0)
    return recorder, time.perf_counter() - started_s


def measure(fleet: Fleet, parts: Sequence[str]) -> dict[str, Any]:
    """Run the parts, on three replicas one after the other, and print each one's table."""
    work = fleet.work
    every = Budget(work.num_adapters, work.num_adapters, work.max_num_seqs)
    few = replace(every, arena=work.num_slots)
    wide = Budget(work.scale_slots, work.scale_host, work.max_num_seqs)
    results: dict[str, Any] = {}

    def over_few(_: Fleet, replica: Replica) -> dict[str, float]:
        budgets = describe(few, fleet.adapters)
        if "ttft" in parts:
            results["ttft"] = show(f"first token, alone: {budgets}", first_tokens(fleet, replica))
            files = (stored_file(fleet.store, digest) for digest in fleet.digests)
            results["disk"] = show("reading such a file and nothing else", raw_disk.table(files, evict_pages))
        if "gaps" in parts:
            results["gaps"] = show(f"gaps between tokens: {budgets}", gaps(fleet, replica))
        return few_slots(fleet, replica) if "slots" in parts else {}

    if {"ttft", "gaps", "slots"} & set(parts):
        swapped = fleet.run(few, over_few)
    if "slots" in parts:
        rows = compare_slots(work, fleet.run(every, all_slots), swapped)
        results["slots"] = show(f"few slots: {describe(few, fleet.adapters)}", rows)
    if "scale" in parts:
        title = f"S-LoRA workload: {describe(wide, fleet.adapters)}"
        results["scale"] = show(title, fleet.run(wide, scale, many=work.num_many))
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    """Added time to the first token, with target and vLLM's."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in results["ttft"] if row["adapter is"] != "resident"]
    labels = [row["adapter is"] for row in rows]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.bar(labels, [row["added_ms"] for row in rows], label="lorafleet")
    axes.plot(labels, [TARGET_ADDED_MS[label] for label in labels], "k_", markersize=40, label="target")
    known = [label for label in labels if label in VLLM_ADDED_MS]
    axes.plot(known, [VLLM_ADDED_MS[label] for label in known], "C3s", label="vLLM 0.25.1")
    axes.set(ylabel="added to the first token, ms", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, PARTS)
    parser.add_argument("--folder", type=Path, help="where adapters are written; a temporary folder by default")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the work")
    parser.add_argument("--modules", default="", help="names of the projections that adapters touch; all by default")
    return parser.parse_args()


def main() -> None:
    options = parse()
    parts = chosen_parts(options.parts, PARTS)
    chosen = {name: int(value) for name, value in (each.split("=", 1) for each in options.set)}
    work = replace(WORKS[options.shape], **chosen)
    if options.device == "cpu":
        torch.set_num_threads(1)
    print(where(), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, started_s = Path(name), time.perf_counter()
        modules = [name for name in options.modules.split(",") if name]
        fleet = Fleet(folder, load_base(folder / "base", options.shape, options.device), work, modules)
        print(f"ready in {time.perf_counter() - started_s:.1f} s: {len(fleet.manifests)} adapters of "
              f"{fleet.adapters.num_bytes} bytes", flush=True)  # fmt: skip
        results = measure(fleet, parts)
    of_work = {"work": asdict(work), "modules": options.modules or "all"}
    record = {"question": __doc__, **where(), "shape": options.shape, **of_work, "results": results}
    write_json(options.out / "gpu_swap.json", record)
    if "ttft" in results:
        plot(results, options.out / "gpu_swap.png")


if __name__ == "__main__":
    main()
