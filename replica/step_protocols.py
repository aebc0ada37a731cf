"""What the step loop asks of its surroundings."""

from collections.abc import Sequence as Items
from typing import Protocol

from replica.messages import FinishReason, GenerateRequest
from replica.model.batch import ForwardBatch
from replica.sequence import Lease, Sequence


class StepAdapters(Protocol):
    """The adapter tiers as the step loop sees them; no call blocks. An image is what a slot holds."""

    def acquire(self, digest: str) -> Lease: ...
    def poll(self) -> None: ...
    def image_bytes(self, digest: str) -> int: ...


class StepObserver(Protocol):
    """Who is told what happened; called from the step thread."""

    def on_start(self, request: GenerateRequest, waited_s: float) -> None:
        """A step works on a request for the first time, `waited_s` after it was submitted."""

    def on_step(self, batch: ForwardBatch, took_s: float, sampled: Items[Sequence]) -> None:
        """A step has been read back. `took_s` counts from its launch, or from the end of the one ahead if later;
        `sampled` are those that got a token by it."""

    def on_end(self, reason: FinishReason) -> None:
        """A choice has ended."""

    def on_withdrawn(self, digest: str) -> None:
        """A version is served no more."""
