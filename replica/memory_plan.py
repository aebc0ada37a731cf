"""How much of a GPU's memory the KV cache gets. Arithmetic only: it touches no device."""

from dataclasses import dataclass

from replica.config import SchedulerConfig
from replica.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device, by who has them: `steps` is what the largest steps take beyond weights and arena.

    `outside` is what other processes and the libraries hold.
    """

    total: int
    outside: int
    weights: int
    arena: int
    steps: int

    def left(self, config: SchedulerConfig) -> int:
        """What may be used for KV; negative when the rest alone is too much."""
        limit = int(self.total * config.gpu_memory_utilization)
        return limit - self.outside - self.weights - self.arena - self.steps - config.graph_reserve_bytes


def plan_kv_blocks(use: MemoryUse, block_bytes: int, config: SchedulerConfig) -> int:
    """How many KV blocks of `block_bytes` to allocate: those asked for, or all that fit.

    Raises OutOfMemory with the bytes of each part when what was asked for, or a single block, does not fit.
    """
    wanted = asked_kv_blocks(block_bytes, config)
    num_left = use.left(config) // block_bytes
    if num_left < max(1, wanted or 0):
        raise OutOfMemory(_explain(use, block_bytes, wanted, config))
    return num_left if wanted is None else wanted


def asked_kv_blocks(block_bytes: int, config: SchedulerConfig, default_bytes: int | None = None) -> int | None:
    """The blocks that the configuration names, or that `default_bytes` hold. Raises OutOfMemory for less than one."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    kv_bytes = config.kv_bytes or default_bytes
    if kv_bytes is None:
        return None
    if kv_bytes < block_bytes:
        raise OutOfMemory(f"scheduler.kv_bytes is {kv_bytes}; one KV block takes {block_bytes} bytes")
    return kv_bytes // block_bytes


def _explain(use: MemoryUse, block_bytes: int, wanted: int | None, config: SchedulerConfig) -> str:
    kv_bytes = (wanted or 1) * block_bytes
    parts = (
        f"base weights {use.weights}",
        f"adapter arena {use.arena}",
        f"largest steps {use.steps}",
        f"graph reserve {config.graph_reserve_bytes}",
        f"outside of this replica {use.outside}",
    )
    limit = int(use.total * config.gpu_memory_utilization)
    return (
        f"the KV cache needs {kv_bytes} bytes for {wanted or 1} blocks, and {max(0, use.left(config))} are left of "
        f"{limit} (gpu_memory_utilization {config.gpu_memory_utilization} of {use.total}): {', '.join(parts)}"
    )
