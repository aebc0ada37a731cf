"""Runs the largest steps there can be, with every adapter slot in use, and reads off what they take."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from replica.adapters.slot_tables import SlotTables
from replica.adapters.slots import SlotArena
from replica.adapters.weights import ImageLayout, largest_layout, view_pairs
from replica.config import SchedulerConfig
from replica.errors import OutOfMemory
from replica.memory_plan import MemoryUse, plan_kv_blocks
from replica.model.batch import ForwardBatch, LoraSegment, SequenceSpan, Site
from replica.model.device_runner import StepLimits

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """What a device tells about its memory, in bytes. `reserved_bytes` is all that this process took there."""

    @property
    def total_bytes(self) -> int: ...
    def outside_bytes(self) -> int:
        """What is in use and not reserved by torch in this process: other processes, contexts, libraries."""

    def reserved_bytes(self) -> int: ...
    def reset_peak(self) -> None:
        """Give back what is cached, and forget the peak."""

    def peak_bytes(self) -> int:
        """The most that was reserved since the last reset."""


class CudaMemory:
    """The memory of a CUDA device, as torch's allocator and the driver tell it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def outside_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - self.reserved_bytes()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


class ProfiledModel(Protocol):
    """What profiling needs of the base model."""

    @property
    def sites(self) -> Sequence[Site]: ...
    @property
    def vocab_size(self) -> int: ...
    def kv_bytes_per_block(self, block_size: int) -> int: ...
    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...
    def attach_adapters(self, memory: torch.Tensor, tables: SlotTables, max_rank: int) -> None: ...
    def prepare(self, limits: StepLimits) -> object: ...
    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


def measure_memory(
    model: ProfiledModel, arena: SlotArena, max_rank: int, config: SchedulerConfig, memory: DeviceMemory
) -> MemoryUse:
    """Run the largest prefill and the largest decode step over a KV cache that just holds them.

    The model keeps that cache and is prepared for steps without graphs: allocate and prepare it anew afterwards.
    Raises torch.OutOfMemoryError when a step does not fit at all.
    """
    memory.reset_peak()
    before = memory.reserved_bytes()
    batches = largest_steps(config)
    num_blocks = sum(len(span.block_table) for span in batches[0][0])
    model.allocate_kv(num_blocks, config.block_size)
    model.attach_adapters(arena.memory, arena.tables, max_rank)
    model.prepare(StepLimits(config.max_batch_tokens, 1))
    with torch.inference_mode(), full_slots(arena, model.sites, max_rank) as layout:
        for spans, is_sampled in batches:
            _run(model, _batch(spans, arena, layout), is_sampled)
    kv_bytes = (num_blocks + 1) * model.kv_bytes_per_block(config.block_size)
    steps = max(0, memory.peak_bytes() - before - kv_bytes)
    return MemoryUse(memory.total_bytes, memory.outside_bytes(), before - arena.num_bytes, arena.num_bytes, steps)


def fit_kv_blocks(
    model: ProfiledModel, arena: SlotArena, max_rank: int, config: SchedulerConfig, memory: DeviceMemory
) -> int:
    """How many KV blocks to allocate. Raises OutOfMemory when they, or the largest steps alone, do not fit."""
    try:
        use = measure_memory(model, arena, max_rank, config, memory)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a step of scheduler.max_batch_tokens {config.max_batch_tokens} does not fit beside the base and an arena "
            f"of {arena.num_bytes} bytes: {error}"
        ) from error
    model.allocate_kv(1, config.block_size)
    memory.reset_peak()
    num_blocks = plan_kv_blocks(use, model.kv_bytes_per_block(config.block_size), config)
    logger.info("%d KV blocks beside %s", num_blocks, use)
    return num_blocks


def largest_steps(config: SchedulerConfig) -> tuple[tuple[tuple[SequenceSpan, ...], bool], ...]:
    """The spans of the largest prefill and of the largest decode step, and whether all of a step's rows are sampled."""
    num_sequences = min(config.max_num_seqs, config.max_batch_tokens)
    share, extra = divmod(config.max_batch_tokens, num_sequences)
    counts = [share + (index < extra) for index in range(num_sequences)]
    sizes = [-(-count // config.block_size) for count in counts]
    tables = [tuple(range(start, end)) for start, end in pairwise(accumulate(sizes, initial=0))]
    prefill = tuple(SequenceSpan(count, count, table) for count, table in zip(counts, tables, strict=True))
    decode = tuple(SequenceSpan(1, count, table) for count, table in zip(counts, tables, strict=True))
    return (prefill, False), (decode, True)


@contextmanager
def full_slots(arena: SlotArena, sites: Sequence[Site], max_rank: int) -> Iterator[ImageLayout]:
    """Let every slot hold the largest adapter that the arena can hold one of; all share the arena's zeros."""
    layout = largest_layout(sites, arena.memory.dtype, arena.memory.numel(), max_rank)
    for slot in range(arena.num_slots):
        arena.tables.write(slot, 0, layout)
    try:
        yield layout
    finally:
        for slot in range(arena.num_slots):
            arena.tables.clear(slot)


def _batch(spans: tuple[SequenceSpan, ...], arena: SlotArena, layout: ImageLayout) -> ForwardBatch:
    """A step of zeros whose rows are spread over all slots, with the logits of every row: a prompt may be scored."""
    device, counts = arena.memory.device, [span.num_tokens for span in spans]
    ends = list(accumulate(counts))
    num_segments = min(arena.num_slots, len(spans))
    cuts = [0, *(ends[(index + 1) * len(spans) // num_segments - 1] for index in range(num_segments))]
    pairs = view_pairs(arena.memory, 0, layout)
    segments = tuple(LoraSegment(start, end, slot, pairs) for slot, (start, end) in enumerate(pairwise(cuts)))
    firsts = [span.context_length - span.num_tokens for span in spans]
    positions = [first + row for first, count in zip(firsts, counts, strict=True) for row in range(count)]
    return ForwardBatch(
        token_ids=torch.zeros(ends[-1], dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        spans=spans,
        logit_rows=torch.arange(ends[-1], device=device),
        segments=segments if layout.places else (),
    )


def _run(model: ProfiledModel, batch: ForwardBatch, is_sampled: bool) -> None:
    """A step and what is done with its logits: every row scored, as a prompt's may be, or drawn from."""
    logprobs = model.forward(batch).log_softmax(dim=-1)
    if is_sampled:
        logprobs.exp().sort(dim=-1).values.cumsum(dim=-1, dtype=torch.float64)
