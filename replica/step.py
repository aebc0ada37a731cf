"""One step's tensors: pack the planned work, launch the model and the sampling. Knows nothing of how requests end."""

from collections.abc import Sequence as Items
from typing import Protocol

import torch

from replica.batching import PromptRows, StepBatch, build_batch
from replica.device_link import DeviceLink
from replica.flight import Flight
from replica.logprobs import ScoredRows, score_rows
from replica.model.batch import ForwardBatch
from replica.sampler import Sampler, Sampling
from replica.scheduler import Work


class StepModel(Protocol):
    """The base model as a step sees it."""

    @property
    def device(self) -> torch.device: ...
    @property
    def context_length(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def kv_bytes_per_block(self, block_size: int) -> int: ...
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Float32 logits [number of logit rows, vocabulary].

        A model on CUDA queues its work on the current stream and returns at once; the logits may lie in a buffer that
        the next forward overwrites, in the order of that stream.
        """


class StepRunner:
    """Launches planned work on the model's device. On an asynchronous device nothing here waits for it."""

    def __init__(self, model: StepModel, sampler: Sampler, link: DeviceLink) -> None:
        self._model = model
        self._sampler = sampler
        self._link = link

    def launch(self, works: Items[Work], before: Flight | None, now_s: float) -> Flight:
        """Begin a step; the tokens that `before` samples may be inputs of it."""
        batch = build_batch(works, None if before is None else before.token_ids, self._link)
        logits = self._model.forward(batch.forward)
        prompts = [(rows, self._score(rows, logits)) for rows in batch.prompt_rows]
        sampling = self._sample(batch, logits)
        read = [work.sequence for work in works if work.is_last and not work.sequence.samples]
        return Flight(batch.forward, works, batch.sampled, sampling, prompts, read, self._link.fetch(), now_s)

    def _sample(self, batch: StepBatch, logits: torch.Tensor) -> Sampling | None:
        if not batch.sampled:
            return None
        if batch.sampled_rows is not None:
            logits = logits.index_select(0, batch.sampled_rows)
        sampling = self._sampler.launch(logits, batch.sampled, self._link)
        for row, sequence in enumerate(batch.sampled):
            sequence.launch_token(row)
        return sampling

    def _score(self, rows: PromptRows, logits: torch.Tensor) -> ScoredRows:
        num_top = rows.sequence.group.request.sampling.prompt_logprobs or 0
        targets = self._link.send(rows.targets, torch.int64)
        return score_rows(logits[rows.start : rows.end], targets, [num_top] * len(targets), self._link)
