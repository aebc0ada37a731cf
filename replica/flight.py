"""A step that was launched and has not been read back. Knows results, not what they mean for a request."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from replica.batching import PromptRows
from replica.device_link import Fetched
from replica.logprobs import ScoredRows
from replica.model.batch import ForwardBatch
from replica.sampler import Chosen, Sampling
from replica.scheduler import Work
from replica.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Flight:
    """What a step computes, which is `works`: `sampling` has a token for each of `sampled`.

    `read` are the sequences whose prompt it reads to the end and that want nothing else. Sequences that end meanwhile
    (aborted, or by a token of the step before) are left out of every result.
    """

    batch: ForwardBatch
    works: Items[Work]
    sampled: list[Sequence]
    sampling: Sampling | None
    prompts: list[tuple[PromptRows, ScoredRows]]
    read: list[Sequence]
    ended: Fetched
    """Nothing but the end of the step, so that a step without results is waited for like any other."""
    launched_at_s: float

    @property
    def token_ids(self) -> torch.Tensor | None:
        """Int64 [len(sampled)] on the device."""
        return None if self.sampling is None else self.sampling.token_ids

    @property
    def holds_history(self) -> bool:
        """Whether some token of it must be known before the next one of its sequence can be chosen."""
        return any(sequence.chooser.needs_history for sequence in self.sampled)

    def tokens(self) -> list[tuple[Sequence, Chosen]]:
        """Wait for the step's tokens. Log-probabilities of prompts go to their sequences."""
        self.ended.lists()
        for rows, scored in self.prompts:
            if rows.sequence.state is not State.ENDED and rows.sequence.prompt_logprobs is not None:
                rows.sequence.prompt_logprobs += scored.read(rows.targets)
        if self.sampling is None:
            return []
        chosen = zip(self.sampled, self.sampling.read(), strict=True)
        return [(sequence, each) for sequence, each in chosen if sequence.state is not State.ENDED]

    def read_prompts(self) -> list[Sequence]:
        return [sequence for sequence in self.read if sequence.state is not State.ENDED]
