"""Configuration of one replica: the base model, the adapter tiers and the scheduler."""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024
QUANTISATION_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|T?Q\d_\w+|F16|F32|BF16|MXFP4\w*)$", re.IGNORECASE)


class Settings(BaseModel):
    """A frozen model that refuses misspelt keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Settings):
    """Which base model, where and how it runs.

    `base` is a GGUF file, a local folder of safetensors, or a hub id. A GGUF file is converted once into `cache_dir`.
    """

    base: str
    revision: str | None = None
    name: str | None = None
    """The model name that clients use for the base; the last part of `base` when omitted."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context_length: int | None = Field(default=None, ge=16)
    num_threads: int | None = Field(default=None, ge=1)
    cache_dir: Path = Path("~/.cache/lorafleet")
    weights: Literal["files", "random"] = "files"
    """"random" makes the architecture of config.json with weights drawn for `seed`: for benchmarks."""
    seed: int = 0
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether decoder layers are compiled; `auto` compiles them on CUDA."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    attention: Literal["auto", "torch"] = "auto"
    """`auto` takes FlashInfer on CUDA where it can serve the base."""
    prefill_backend: Literal["auto", "fa2", "fa3"] = "fa2"
    """FlashInfer's kernels for steps with prompts in them."""
    decode_tensor_cores: bool | None = None
    """FlashInfer's kernels for decode steps; None chooses by the number of query heads that share a key head."""

    @property
    def base_name(self) -> str:
        """The name clients use: `name`, or the last part of `base` (of a GGUF file, without its quantisation)."""
        last = Path(self.base).name
        is_gguf = last.lower().endswith(".gguf")
        return self.name or (QUANTISATION_SUFFIX.sub("", last[: -len(".gguf")]) if is_gguf else last)


class AdapterCacheConfig(Settings):
    """Byte budgets of the three tiers of one replica."""

    max_slots: int = Field(default=8, ge=1, le=4096)
    arena_bytes: int = Field(default=256 * MIB, ge=1)
    host_bytes: int = Field(default=1024 * MIB, ge=1)
    node_store: Path = Path("~/.cache/lorafleet/node")
    node_store_bytes: int = Field(default=8192 * MIB, ge=1)
    max_rank: int = Field(default=256, ge=1, le=256)
    num_load_threads: int = Field(default=4, ge=1, le=64)
    num_read_threads: int | None = Field(default=None, ge=1, le=64)
    """Threads, or processes, that share the reading of one adapter; when omitted, 8 on CUDA and 1 on a CPU."""
    read_in_processes: bool | None = None
    """Whether processes of their own read adapters, not threads beside the steps; when omitted, on CUDA."""
    failure_ttl_s: float = Field(default=10.0, ge=0)
    drain_after_s: float = Field(default=1.0, ge=0)
    """How long an adapter waits for a slot while others are in constant use, before one of them takes no more work."""


class SchedulerConfig(Settings):
    """Continuous batching under a token budget."""

    policy: Literal["drr", "fcfs"] = "drr"
    quantum_tokens: int = Field(default=256, ge=1)
    """What a tenant earns in a round for a unit of weight, and may send at once when it comes back (`drr` only)."""
    max_batch_tokens: int = Field(default=512, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_waiting: int = Field(default=1024, ge=1)
    block_size: int = Field(default=16, ge=1)
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """Number of KV blocks; when omitted, as many as `kv_bytes` holds."""
    kv_bytes: int | None = Field(default=None, ge=1)
    """Memory of the KV cache; when omitted, what is left on CUDA, and 512 MiB on a CPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """The share of the GPU's memory that the replica takes, everything in it."""
    graph_reserve_bytes: int = Field(default=1024 * MIB, ge=0)
    """What of that share is left free for CUDA graphs, which are captured after the KV cache is there."""
    adapter_patience_s: float = Field(default=0.0, ge=0)
    """How long requests of adapters in the batch may go ahead of one that adds an adapter; 0 is never."""
    kv_share: float = Field(default=1.0, gt=0, le=1)
    """The part of the KV blocks that tenants may claim back by weight from those that hold more (`drr` only)."""
    prefix_cache: bool = False
    """Whether KV blocks are found again by later requests of the same tenant and adapter version."""


class MetricsConfig(Settings):
    """How many adapters and tenants have series of their own; later ones share those of `_other`."""

    max_adapters: int = Field(default=2000, ge=1)
    """Versions that have been served and not withdrawn, the base among them."""
    max_tenants: int = Field(default=1000, ge=1)
    tenant_idle_s: float = Field(default=3600.0, gt=0)
    """A tenant without a request for so long has no series any more, until its next one."""


class ReplicaConfig(Settings):
    """Everything one replica needs to know."""

    model: ModelConfig
    adapters: AdapterCacheConfig = AdapterCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    metrics: MetricsConfig = MetricsConfig()
    stall_s: float = Field(default=60.0, gt=0)
    """A replica that has work and ends no step for so long counts as hung, and is replaced."""
