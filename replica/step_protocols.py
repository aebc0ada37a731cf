"""What the step loop asks of its surroundings."""

from typing import Protocol

from replica.messages import FinishReason
from replica.model.batch import ForwardBatch
from replica.sequence import Lease, RequestGroup


class StepAdapters(Protocol):
    """The adapter tiers as the step loop sees them; no call blocks.

    `load_s` is what bringing an adapter into a slot would take, going by the loads so far; 0 while there was none.
    """

    def acquire(self, digest: str) -> Lease: ...
    def poll(self) -> None: ...
    def load_s(self, digest: str) -> float: ...


class StepObserver(Protocol):
    """Who is told what happened; called from the step thread."""

    def on_start(self, group: RequestGroup, waited_s: float) -> None:
        """A step works on a request for the first time, `waited_s` after it was submitted."""

    def on_step(self, batch: ForwardBatch, took_s: float) -> None:
        """A step has been read back. `took_s` counts from its launch, or from the end of the one ahead if later."""

    def on_end(self, reason: FinishReason) -> None:
        """A choice has ended."""

    def on_withdrawn(self, digest: str) -> None:
        """A version is served no more."""
