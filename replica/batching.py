"""From planned work to one packed forward, and back from rows of logits to sequences. Knows nothing of why or who."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter

import torch

from replica.device_link import DeviceLink
from replica.model.batch import ForwardBatch, LoraPair, LoraSegment, SequenceSpan
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
    """A forward batch, and whose logits come back: row `sampled_rows[i]` gives `sampled[i]` its next token.

    `sampled_rows`, int64 on the device, is None when these are all the rows, in order.
    """

    forward: ForwardBatch
    sampled: list[Sequence]
    sampled_rows: torch.Tensor | None
    prompt_rows: list[PromptRows]


@dataclass(slots=True)
class _Packer:
    """Lists that grow by one sequence's share at a time. Row `unknown[i]` is token `flight_rows[i]` in flight."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    spans: list[SequenceSpan] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    flight_rows: list[int] = field(default_factory=list)

    def add(self, work: Work) -> None:
        sequence, num_tokens = work.sequence, work.num_tokens
        start, row = sequence.num_computed, len(self.token_ids)
        end = start + num_tokens
        if num_tokens == 1:
            self._add_token(sequence, start, row)
        else:
            self._add_prompt(sequence, start, end)
        self.spans.append(SequenceSpan(num_tokens, end, sequence.blocks))
        if sequence.prompt_logprobs is not None:
            self._want_prompt(sequence, start, end, row)
        if work.is_last and sequence.samples:
            self.sampled.append(sequence)
            self.sampled_rows.append(len(self.logit_rows))
            self.logit_rows.append(row + num_tokens - 1)

    def _add_token(self, sequence: Sequence, position: int, row: int) -> None:
        """One whose value only the device knows stands as 0 until `pack` puts it in its place."""
        self.positions.append(position)
        if position < len(sequence.tokens):
            self.token_ids.append(sequence.tokens[position])
        else:
            self.token_ids.append(0)
            self.unknown.append(row)
            self.flight_rows.append(sequence.flight_row)

    def _add_prompt(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens that are all known: one in flight is the only one that its sequence has to compute."""
        assert end <= len(sequence.tokens), f"{sequence} computes an unknown token beside others"
        self.token_ids += sequence.tokens[start:end]
        self.positions += range(start, end)

    def _want_prompt(self, sequence: Sequence, start: int, end: int, row: int) -> None:
        """Row i predicts token i + 1; rows whose log-probabilities were asked for before a preemption are skipped."""
        first = max(start, sequence.num_scored - 1)
        last = min(end, sequence.num_prompt - 1)
        if first < last:
            place = len(self.logit_rows)
            self.logit_rows += range(row + first - start, row + last - start)
            self.prompt_rows.append(PromptRows(sequence, place, place + last - first, first + 1))
            sequence.num_scored = last + 1

    def pack(self, segments: tuple[LoraSegment, ...], in_flight: torch.Tensor | None, link: DeviceLink) -> StepBatch:
        """Send all index lists in one copy."""
        lists = (self.token_ids, self.positions, self.logit_rows, self.sampled_rows, self.unknown, self.flight_rows)
        sent = link.send(list(chain.from_iterable(lists)), torch.int64)
        ends = list(accumulate(len(each) for each in lists))
        parts = [sent[end - len(each) : end] for end, each in zip(ends, lists, strict=True)]
        token_ids, positions, logit_rows, sampled_rows, unknown, flight_rows = parts
        if self.unknown:
            assert in_flight is not None, "a token is in flight, and no step is"
            token_ids.index_copy_(0, unknown, in_flight.index_select(0, flight_rows))
        forward = ForwardBatch(token_ids, positions, tuple(self.spans), logit_rows, segments)
        are_all = len(self.sampled_rows) == len(self.logit_rows)
        return StepBatch(forward, self.sampled, None if are_all else sampled_rows, self.prompt_rows)


def build_batch(works: Items[Work], in_flight: torch.Tensor | None, link: DeviceLink) -> StepBatch:
    """Pack `works`: base-only sequences first, then slot by slot, so that the rows of a slot are neighbours.

    `in_flight`, int64 on the device, are the tokens that the step before samples; those that are needed here are
    copied there, by the device. Sequences note which prompt tokens they have asked log-probabilities for.
    """
    placed = sorted(((work.sequence.slot, work) for work in works), key=itemgetter(0))
    packer = _Packer()
    for _, work in placed:
        packer.add(work)
    return packer.pack(_segments(placed), in_flight, link)


def _segments(placed: Items[tuple[int, Work]]) -> tuple[LoraSegment, ...]:
    """One segment a slot: `placed` is in the order of slots."""
    bounds: dict[int, tuple[int, int, Work]] = {}
    row = 0
    for slot, work in placed:
        end = row + work.num_tokens
        if slot != NO_SLOT:
            start = bounds[slot][0] if slot in bounds else row
            bounds[slot] = (start, end, work)
        row = end
    return tuple(LoraSegment(start, end, slot, _pairs(work)) for slot, (start, end, work) in bounds.items())


def _pairs(work: Work) -> Mapping[int, LoraPair]:
    lease = work.sequence.group.lease
    assert lease is not None
    return lease.pairs
