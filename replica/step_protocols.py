"""What the step loop asks of its surroundings."""

from typing import Protocol

from replica.messages import FinishReason
from replica.model.batch import ForwardBatch
from replica.sequence import Lease


class StepAdapters(Protocol):
    """The adapter tiers as the step loop sees them; neither call blocks."""

    def acquire(self, digest: str) -> Lease: ...
    def poll(self) -> None: ...


class StepObserver(Protocol):
    """Who is told what happened; called from the step thread."""

    def on_start(self, waited_s: float, num_prompt: int) -> None: ...
    def on_step(self, batch: ForwardBatch, took_s: float) -> None:
        """A step has been read back. `took_s` counts from its launch, or from the end of the one ahead if later."""

    def on_end(self, reason: FinishReason, num_output: int) -> None: ...
