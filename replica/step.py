"""One step's tensors: pack the planned work, run the model, sample. Knows nothing of how requests start or end."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch

from replica.batching import PromptRows, StepBatch, build_batch
from replica.model.batch import ForwardBatch
from replica.sampler import Chosen, Sampler, token_logprobs
from replica.scheduler import Work
from replica.sequence import Sequence


class StepModel(Protocol):
    """The base model as a step sees it."""

    @property
    def device(self) -> torch.device: ...
    @property
    def context_length(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Float32 logits [number of logit rows, vocabulary]."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The batch that ran, and the token chosen for each sequence that got one."""

    batch: ForwardBatch
    chosen: list[tuple[Sequence, Chosen]]


class StepRunner:
    """Runs planned work on the model. Prompts' log-probabilities go to their sequences, tokens to the caller."""

    def __init__(self, model: StepModel, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler

    def run(self, works: Items[Work]) -> StepResult:
        batch = build_batch(works, self._model.device)
        logits = self._model.forward(batch.forward)
        for rows in batch.prompt_rows:
            _read_prompt(rows, logits)
        return StepResult(batch.forward, self._sample(batch, logits))

    def _sample(self, batch: StepBatch, logits: torch.Tensor) -> list[tuple[Sequence, Chosen]]:
        if not batch.sampled:
            return []
        if len(batch.sampled) < len(logits):
            logits = logits[torch.tensor(batch.sampled_rows, device=logits.device)]
        return list(zip(batch.sampled, self._sampler.choose(logits, batch.sampled), strict=True))


def _read_prompt(rows: PromptRows, logits: torch.Tensor) -> None:
    sequence, targets = rows.sequence, rows.targets
    num_top = sequence.group.request.sampling.prompt_logprobs or 0
    assert sequence.prompt_logprobs is not None
    sequence.prompt_logprobs += token_logprobs(logits[rows.start : rows.end], targets, [num_top] * len(targets))
