"""From planned work to one packed forward, and back from rows of logits to sequences. Knows nothing of why or who."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from replica.model.batch import ForwardBatch, LoraSegment, SequenceSpan
from replica.scheduler import Work
from replica.sequence import NO_SLOT, Sequence


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows [start, end) of a step predict the tokens of `sequence` from position `first` on."""

    sequence: Sequence
    start: int
    end: int
    first: int

    @property
    def targets(self) -> list[int]:
        return self.sequence.tokens[self.first : self.first + self.end - self.start]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A forward batch, and whose logits come back: row `sampled_rows[i]` gives `sampled[i]` its next token."""

    forward: ForwardBatch
    sampled: list[Sequence]
    sampled_rows: list[int]
    prompt_rows: list[PromptRows]

    @property
    def num_adapters(self) -> int:
        return len(self.forward.segments)


@dataclass(slots=True)
class _Packer:
    """Lists that grow by one sequence's share at a time."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    spans: list[SequenceSpan] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)

    def add(self, work: Work) -> None:
        sequence, start = work.sequence, work.sequence.num_computed
        end, row = start + work.num_tokens, len(self.token_ids)
        self.token_ids += sequence.tokens[start:end]
        self.positions += range(start, end)
        self.spans.append(SequenceSpan(work.num_tokens, end, sequence.blocks))
        if sequence.prompt_logprobs is not None:
            self._want_prompt(sequence, start, end, row)
        if work.is_last and sequence.group.request.sampling.max_tokens:
            self.sampled.append(sequence)
            self.sampled_rows.append(len(self.logit_rows))
            self.logit_rows.append(row + work.num_tokens - 1)

    def _want_prompt(self, sequence: Sequence, start: int, end: int, row: int) -> None:
        """Row i predicts token i + 1; rows whose log-probabilities an interrupted prefill left behind are skipped."""
        assert sequence.prompt_logprobs is not None
        first = max(start, len(sequence.prompt_logprobs) - 1)
        last = min(end, sequence.num_prompt - 1)
        if first < last:
            place = len(self.logit_rows)
            self.logit_rows += range(row + first - start, row + last - start)
            self.prompt_rows.append(PromptRows(sequence, place, place + last - first, first + 1))

    def pack(self, segments: tuple[LoraSegment, ...], device: torch.device) -> StepBatch:
        """Move the three index lists to the device as one tensor."""
        num_tokens = len(self.token_ids)
        index = torch.tensor(self.token_ids + self.positions + self.logit_rows, dtype=torch.int64).to(device)
        token_ids, positions = index[:num_tokens], index[num_tokens : 2 * num_tokens]
        forward = ForwardBatch(token_ids, positions, tuple(self.spans), index[2 * num_tokens :], segments)
        return StepBatch(forward, self.sampled, self.sampled_rows, self.prompt_rows)


def build_batch(works: Items[Work], device: torch.device) -> StepBatch:
    """Pack `works`: base-only sequences first, then slot by slot, so that the rows of a slot are neighbours."""
    works = sorted(works, key=lambda work: work.sequence.slot)
    packer = _Packer()
    for work in works:
        packer.add(work)
    return packer.pack(_segments(works), device)


def _segments(works: Items[Work]) -> tuple[LoraSegment, ...]:
    segments: list[LoraSegment] = []
    row, last_slot = 0, NO_SLOT
    for work in works:
        slot, lease, end = work.sequence.slot, work.sequence.group.lease, row + work.num_tokens
        if slot == last_slot and segments:
            segments[-1] = LoraSegment(segments[-1].start, end, slot, segments[-1].pairs)
        elif lease is not None:
            segments.append(LoraSegment(row, end, slot, lease.pairs))
        row, last_slot = end, slot
    return tuple(segments)
