"""A whole replica over a base with random weights, and adapters of it on disk: what the swap benchmarks run."""

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gpu_fixture import SHAPES, write_base
from registry.types import AdapterManifest, ModuleLora, TensorInfo
from replica.config import MIB, AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.messages import GenerateRequest, SamplingParams, TokenChunk
from replica.model.base_model import BaseModel
from replica.model.batch import Site
from replica.replica import Replica

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


class LinkSource:
    """Serves blobs as hard links: nothing is copied, and versions of the same bytes share them on disk."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def fetch(self, sha256: str, to: Path) -> None:
        to.unlink(missing_ok=True)
        os.link(self.paths[sha256], to)


def load_base(folder: Path, shape: str, device: str) -> BaseModel:
    """The shape with random weights; its files stay in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_base(folder, SHAPES[shape])
    fields = {"base": str(folder), "name": shape, "weights": "random", "device": device, "num_threads": None}
    return BaseModel.load(ModelConfig.model_validate(fields))


class AdapterFolder:
    """Adapters of rank `rank`, as safetensors files; each is the first one's values, rolled.

    They touch the projections of these names, or all.
    """

    def __init__(
        self, folder: Path, base: BaseModel, rank: int, source: LinkSource, modules: Sequence[str] = ()
    ) -> None:
        self._folder, self._base, self._rank, self._source = folder, base, rank, source
        self._sites = [site for site in base.sites if not modules or site.path.rpartition(".")[2] in modules]
        shapes = [shape for site in self._sites for shape in _shapes(site, rank)]
        self._num_values = sum(rows * columns for _, (rows, columns) in shapes)
        generator = torch.Generator().manual_seed(0)
        self._values = (torch.randn(self._num_values, generator=generator) * 0.01).to(base.dtype)
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def num_bytes(self) -> int:
        """Of one adapter."""
        return self._num_values * self._base.dtype.itemsize

    def make(self, index: int) -> AdapterManifest:
        """Write the file of an adapter and describe it."""
        values = self._values.roll(index * 1031)
        tensors, place = {}, 0
        for site in self._sites:
            for key, (rows, columns) in _shapes(site, self._rank):
                tensors[key] = values[place : place + rows * columns].view(rows, columns)
                place += rows * columns
        path = self._folder / f"{index}.safetensors"
        save_file(tensors, path)
        blob_sha256 = _sha256_of(path)
        self._source.paths[blob_sha256] = path
        infos = {key: _info(key, tensor) for key, tensor in tensors.items()}
        modules = tuple(_module(site, self._rank, infos) for site in self._sites)
        return _manifest(modules, blob_sha256, path.stat().st_size, str(index))


def twin(manifest: AdapterManifest, name: str) -> AdapterManifest:
    """Another version of the same bytes."""
    return _manifest(manifest.modules, manifest.blob_sha256, manifest.blob_bytes, name)


def _manifest(modules: tuple[ModuleLora, ...], blob_sha256: str, blob_bytes: int, name: str) -> AdapterManifest:
    return AdapterManifest(
        digest=hashlib.sha256(f"{blob_sha256} {name}".encode()).hexdigest(),
        base_digest="0" * 64,
        base_verified=True,
        modules=modules,
        blob_sha256=blob_sha256,
        blob_bytes=blob_bytes,
    )


def _shapes(site: Site, rank: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    key = f"base_model.model.{site.path}"
    return (f"{key}.lora_A.weight", (rank, site.in_features)), (f"{key}.lora_B.weight", (site.out_features, rank))


def _module(site: Site, rank: int, infos: dict[str, TensorInfo]) -> ModuleLora:
    (a, _), (b, _) = _shapes(site, rank)
    return ModuleLora(path=site.path, rank=rank, alpha=float(rank), scale=1.0, a=infos[a], b=infos[b])


def _info(key: str, tensor: torch.Tensor) -> TensorInfo:
    raw: np.ndarray = tensor.view(torch.uint8).numpy()  # type: ignore[type-arg]
    fields = {"key": key, "dtype": _NAMES[tensor.dtype], "shape": tuple(tensor.shape)}
    return TensorInfo.model_validate({**fields, "sha256": hashlib.sha256(raw).hexdigest()})


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


@dataclass(frozen=True)
class Budget:
    """How many adapters of one size the arena and the host cache hold, and how many sequences run at once."""

    arena: int
    host: int
    max_num_seqs: int = 64
    num_kv_blocks: int = 4096
    max_batch_tokens: int = 2048


@contextmanager
def running(
    base: BaseModel, budget: Budget, adapters: AdapterFolder, store: Path, source: LinkSource
) -> Iterator[Replica]:
    """A replica with these budgets, over the base that is loaded already."""
    config = ReplicaConfig(
        model=ModelConfig(base="random"),
        adapters=AdapterCacheConfig(
            max_slots=budget.arena,
            arena_bytes=budget.arena * _image_bytes(base, adapters),
            host_bytes=budget.host * _image_bytes(base, adapters),
            node_store=store,
            node_store_bytes=1 << 50,
            max_rank=adapters._rank,
        ),
        scheduler=SchedulerConfig(
            policy="fcfs",
            max_num_seqs=budget.max_num_seqs,
            max_batch_tokens=budget.max_batch_tokens,
            max_waiting=100_000,
            num_kv_blocks=budget.num_kv_blocks,
        ),
    )
    # The KV cache has its size, so what the largest steps take need not be measured: that would double the start.
    replica = Replica(config, source, model_loader=lambda _: base, device_memory=lambda _: None)
    replica.load()
    try:
        yield replica
    finally:
        replica.close()


def _image_bytes(base: BaseModel, adapters: AdapterFolder) -> int:
    """With room for the alignment of each tensor."""
    return adapters.num_bytes + 2 * 128 * len(base.sites)


def stage(replica: Replica, manifests: Sequence[AdapterManifest]) -> None:
    """Bring versions onto the node, many at a time."""

    async def stage_all() -> None:
        await asyncio.gather(*(replica.stage(manifest) for manifest in manifests))

    asyncio.run(stage_all())


def stored_file(store: Path, digest: str) -> Path:
    """Where a node store has a version's bytes."""
    return store / "bytes" / f"{digest}.safetensors"


def evict_pages(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@dataclass
class Times:
    """When a request was submitted and when each of its tokens came, in seconds of one clock."""

    submitted_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens_s[0] - self.submitted_s


class Recorder:
    """An outbox that keeps the time of every token; `wait` raises what a request ended with."""

    def __init__(self) -> None:
        self.times: dict[str, Times] = {}
        self._open: set[str] = set()
        self._errors: list[Exception] = []
        self._changed = threading.Condition()

    def submit(self, replica: Replica, request: GenerateRequest) -> None:
        with self._changed:
            self.times[request.request_id] = Times(time.perf_counter())
            self._open.add(request.request_id)
        replica.submit(request, self)

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for chunk in chunks:
                self.times[chunk.request_id].tokens_s += [now_s] * len(chunk.token_ids)
                if chunk.error is not None:
                    self._errors.append(chunk.error)
                if chunk.finish_reason is not None:
                    self._open.discard(chunk.request_id)
            self._changed.notify_all()

    def wait(self, timeout_s: float = 300.0) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open or bool(self._errors), timeout_s):
                raise TimeoutError(f"{len(self._open)} requests had not ended after {timeout_s} s")
            if self._errors:
                raise self._errors[0]

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens_s) for each in self.times.values())


def make_request(name: str, adapter: str | None, prompt: Sequence[int], num_output: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, "tenant", adapter, tuple(prompt), sampling)


def describe(budget: Budget, adapters: AdapterFolder) -> str:
    """The budgets in words, for a table's head."""
    size = adapters.num_bytes
    return (
        f"arena {budget.arena} adapters ({budget.arena * size / MIB:.0f} MiB), host {budget.host} "
        f"({budget.host * size / MIB:.0f} MiB), {budget.max_num_seqs} rows"
    )


def write_json(path: Path, record: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
