"""Copies of images into slots, off the step thread. Knows nothing of who waits for them or why."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from replica.adapters.host_cache import HostLease
from replica.adapters.stats import LoadTimes, Source
from replica.adapters.waiters import Waiter
from replica.adapters.weights import AdapterImage, view_pairs
from replica.errors import AdapterUnavailable, ReplicaError
from replica.model.batch import LoraPair


@dataclass(slots=True)
class SlotCopy:
    """One copy, for `waiter`; `pairs` or `error` is set when it ended. `borrowed` keeps the image in the host cache.

    `read_s` and `copy_s` are what reading the image for this copy took, and the copy itself, in seconds.
    """

    waiter: Waiter
    slot: int
    image: AdapterImage
    borrowed: HostLease | None
    source: Source
    read_s: float
    started_s: float
    ended_s: float = 0.0
    copy_s: float = 0.0
    pairs: Mapping[int, LoraPair] | None = None
    error: ReplicaError | None = None


class CopyQueue:
    """Runs copies on the threads of `executor` and hands them back to the step thread when they ended."""

    def __init__(
        self,
        copier: "SlotCopier",
        executor: Executor,
        times: LoadTimes,
        clock: Callable[[], float],
        on_settled: Callable[[], None],
    ) -> None:
        self._copier, self._executor = copier, executor
        self._times, self._clock = times, clock
        self._on_settled = on_settled
        self._finished: deque[SlotCopy] = deque()

    def submit(self, copy: SlotCopy, start: int) -> None:
        """Begin a copy to element `start` of the arena; called by the step thread."""
        self._executor.submit(self._run, copy, start, self._copier.fence())

    def finished(self) -> list[SlotCopy]:
        """The copies that ended since the last call."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found

    def _run(self, copy: SlotCopy, start: int, fence: torch.cuda.Event | None) -> None:
        started_s = self._clock()
        try:
            copy.pairs = self._copier.copy(copy.image, start, fence)
            copy.image.layout.columns  # noqa: B018  made here, so that the step thread finds them
            copy.ended_s = self._clock()
            copy.copy_s = copy.ended_s - started_s
            self._times.observe("copy", copy.copy_s, copy.source)
        except Exception as error:
            copy.error = AdapterUnavailable(f"adapter {copy.image.digest} could not be copied to its slot: {error}")
        if copy.borrowed is not None:
            copy.borrowed.release()
        self._finished.append(copy)
        self._on_settled()


class SlotCopier:
    """Copies images into the arena; on CUDA over a stream of its own, so that decode steps go on meanwhile."""

    def __init__(self, arena: torch.Tensor) -> None:
        self._arena = arena
        self._stream: torch.cuda.Stream | None = None
        if arena.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event | None:
        """Marks what the step thread has launched so far: a copy that waits for it overwrites nothing in use."""
        return None if self._stream is None else torch.cuda.current_stream(self._arena.device).record_event()

    def copy(self, image: AdapterImage, start: int, fence: torch.cuda.Event | None) -> Mapping[int, LoraPair]:
        """Copy an image to element `start`; blocks a load thread until the bytes are there. Returns views of them."""
        target = self._arena[start : start + image.layout.num_elements]
        if self._stream is None:
            _copy_on_one_core(target, image.data)
        else:
            _copy_on_stream(target, image.data, self._stream, fence)
        return view_pairs(self._arena, start, image.layout)


def _copy_on_one_core(target: torch.Tensor, source: torch.Tensor) -> None:
    """A plain memcpy without the interpreter's lock; torch's own copy would take every core from the step."""
    target.view(torch.uint8).numpy()[:] = source.view(torch.uint8).numpy()


def _copy_on_stream(
    target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream, fence: torch.cuda.Event | None
) -> None:
    with torch.cuda.stream(stream):
        if fence is not None:
            stream.wait_event(fence)
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
    done.synchronize()
