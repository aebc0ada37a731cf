"""Steps recorded once for each number of rows and room for adapters, and replayed. Knows nothing of models."""

import gc
import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

Recorded = TypeVar("Recorded")
Replay = Callable[[], None]

Cut = Callable[[int], None]
"""Called at each cut of a step in pieces, with the number of the layer whose attention is due."""

Pieces = Callable[[Cut], None]
"""A step from fixed addresses to fixed addresses, which calls what it is given at each cut."""


class Recorder(Protocol):
    """Turns a function of fixed addresses into one that does the same again."""

    def record(self, run: Callable[[], None]) -> Replay: ...


class DirectRecorder:
    """Records nothing: each replay runs the function. For CPUs, and for steps that cannot be captured."""

    def record(self, run: Callable[[], None]) -> Replay:
        return run

    def record_pieces(self, run: Pieces) -> Pieces:
        return run


class GraphRecorder:
    """CUDA graphs that share one memory pool; they may run one at a time only."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Replay:
        """Run once for what the first run of a shape prepares, then capture."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Replay = graph.replay
        return replay

    def record_pieces(self, run: Pieces) -> Pieces:
        """The same for a step in pieces: each cut ends a graph and begins the next."""
        run(lambda layer: None)
        torch.cuda.synchronize()
        pieces: list[tuple[torch.cuda.CUDAGraph, int]] = []
        with torch.cuda.stream(self._stream):
            graph = self._begin()

            def cut(layer: int) -> None:
                nonlocal graph
                graph.capture_end()
                pieces.append((graph, layer))
                graph = self._begin()

            run(cut)
            graph.capture_end()
        torch.cuda.synchronize()
        last = graph

        def replay(cut: Cut) -> None:
            for piece, layer in pieces:
                piece.replay()
                cut(layer)
            last.replay()

        return replay

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What starting took: kernels compiled and planned (`compile_s`), graphs captured (`capture_s`, `graph_bytes`).

    `num_graphs` counts decode steps, `num_prompt_steps` the steps recorded in pieces.
    """

    num_graphs: int = 0
    num_prompt_steps: int = 0
    largest_bucket: int = 0
    is_compiled: bool = False
    compile_s: float = 0.0
    capture_s: float = 0.0
    graph_bytes: int = 0


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record, rising, up to `max_num_seqs`. One row alone is padded to two: compilers treat 1 apart.

    Above 64 in larger steps: products of our own are faster with blocks that are full of rows.
    """
    sizes = {size for size in (2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)) if size < max_num_seqs}
    return tuple(sorted(sizes | {max(2, max_num_seqs)}))


class StepGraphs(ABC, Generic[Recorded]):
    """One recording for each bucket of rows and each *room*: the largest rank there may be, 0 without adapters.

    What has room for more takes longer, whatever the ranks turn out to be.
    """

    def __init__(self, buckets: Sequence[int], rooms: Sequence[int]) -> None:
        self.buckets, self.rooms = tuple(buckets), tuple(rooms)
        self._recorded: dict[tuple[int, int], Recorded] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(buckets={self.buckets}, rooms={self.rooms}, recorded={len(self._recorded)})"

    def __len__(self) -> int:
        return len(self._recorded)

    def bucket(self, num_rows: int) -> int | None:
        """The smallest bucket that holds so many rows; None when none does."""
        place = bisect_left(self.buckets, num_rows)
        return self.buckets[place] if place < len(self.buckets) else None

    def room(self, max_rank: int) -> int:
        """The smallest room for ranks up to `max_rank`."""
        assert max_rank <= self.rooms[-1], f"rank {max_rank}, and room for {self.rooms[-1]}"
        return self.rooms[bisect_left(self.rooms, max_rank)]

    def record_all(self, plan: Callable[[int], None]) -> None:
        """Record every bucket, the largest first, so that the others fit into its memory.

        `plan(bucket)` fills the buffers with a step of padding, before each recording.
        """
        with quick_collections():
            for bucket, room in product(reversed(self.buckets), self.rooms):
                plan(bucket)
                self._recorded[bucket, room] = self._record(bucket, room)

    @abstractmethod
    def _record(self, bucket: int, room: int) -> Recorded: ...


class DecodeGraphs(StepGraphs[Replay]):
    """Steps of one row a sequence. `run(bucket, room)` computes one from fixed addresses to fixed addresses."""

    def __init__(
        self, buckets: Sequence[int], rooms: Sequence[int], recorder: Recorder, run: Callable[[int, int], None]
    ) -> None:
        super().__init__(buckets, rooms)
        self._recorder, self._run = recorder, run

    def replay(self, bucket: int, room: int) -> None:
        self._recorded[bucket, room]()

    def _record(self, bucket: int, room: int) -> Replay:
        return self._recorder.record(lambda: self._run(bucket, room))


@contextmanager
def quick_collections() -> Iterator[None]:
    """Captures collect garbage each time; what lives already need not be looked at again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Stopwatch:
    """Seconds and device bytes since it was made. What was cached then is given back first, as captures would do it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._bytes = self._reserved()
        self._started_s = time.monotonic()

    def seconds(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - self._started_s

    def bytes(self) -> int:
        return self._reserved() - self._bytes

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
