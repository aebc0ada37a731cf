"""The copy of an image into its slot, off the step thread. Knows nothing of which slot or why."""

from collections.abc import Mapping

import torch

from replica.adapters.weights import AdapterImage, view_pairs
from replica.model.batch import LoraPair


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
