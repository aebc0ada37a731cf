"""Where the rows of one packed step read and write KV slots, as index tensors built once a step. Knows no weights.

A slot is one token's place in the cache: block * block_size + offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from replica.model.batch import SequenceSpan

Ints = NDArray[np.int64]

MIN_SAVED_TOKENS = 256
"""Decode rows are split into groups of like length when that saves at least this much padding a row."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One-token rows attended together: `slots` is [num_rows * length]; `mask`, [num_rows, 1, 1, length], is additive.

    Padding repeats the row's own last slot, so that masked places never hold another tenant's infinities.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    num_rows: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Rows [start, end) of one sequence. `slots` is None when the keys are these rows themselves.

    `mask` is additive, [end - start, num_keys]; without a mask the part is plainly causal.
    """

    start: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionView:
    """The step as layers of one sliding window see it."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillPart, ...]

    @property
    def is_one_group(self) -> bool:
        """Whether the step is one group of decodes, in the batch's order."""
        return len(self.decodes) == 1 and not self.prefills


class AttentionPlan:
    """Index tensors of one step: `slot_mapping` [num_tokens] says where each row's key and value go."""

    def __init__(
        self, spans: Sequence[SequenceSpan], block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._block_size, self._device, self._dtype = block_size, device, dtype
        self._num_tokens: Ints = np.array([span.num_tokens for span in spans], dtype=np.int64)
        self._contexts: Ints = np.array([span.context_length for span in spans], dtype=np.int64)
        self._row_starts: Ints = np.cumsum(self._num_tokens) - self._num_tokens
        self._blocks: Ints = np.fromiter(chain.from_iterable(span.block_table for span in spans), dtype=np.int64)
        table_lengths: Ints = np.array([len(span.block_table) for span in spans], dtype=np.int64)
        self._table_starts: Ints = np.cumsum(table_lengths) - table_lengths
        assert bool(np.all(self._num_tokens >= 1)), "a span has no tokens"
        assert bool(np.all(table_lengths * block_size >= self._contexts)), "a block table is too short"
        self._views: dict[int | None, AttentionView] = {}
        self.num_rows = int(self._num_tokens.sum())
        self.slot_mapping = self._tensor(self._new_slots())

    def view(self, window: int | None) -> AttentionView:
        """The view of layers that see the last `window` tokens, the current one included (None: all of them)."""
        if window is not None and window >= int(self._contexts.max()):
            window = None
        if window not in self._views:
            self._views[window] = self._build_view(window)
        return self._views[window]

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _slots(self, sequences: Ints, positions: Ints) -> Ints:
        """Slots of token `positions` of `sequences` (indices into the spans), shaped as the two broadcast."""
        blocks = self._blocks[self._table_starts[sequences] + positions // self._block_size]
        slots: Ints = blocks * self._block_size + positions % self._block_size
        return slots

    def _new_slots(self) -> Ints:
        sequences = np.repeat(np.arange(len(self._num_tokens)), self._num_tokens)
        first_positions = self._contexts - self._num_tokens
        positions = np.arange(self.num_rows) - self._row_starts[sequences] + first_positions[sequences]
        return self._slots(sequences, positions)

    def _build_view(self, window: int | None) -> AttentionView:
        prefills = np.flatnonzero(self._num_tokens > 1)
        return AttentionView(
            decodes=tuple(self._decode_group(members, window) for members in self._groups(window)),
            prefills=tuple(self._prefill_part(int(sequence), window) for sequence in prefills),
        )

    def _visible(self, sequences: Ints, window: int | None) -> Ints:
        contexts = self._contexts[sequences]
        return contexts if window is None else np.minimum(contexts, window)

    def _groups(self, window: int | None) -> list[Ints]:
        """Decode sequences split by visible length; within a group they keep the batch's order."""
        decodes = np.flatnonzero(self._num_tokens == 1)
        if decodes.size == 0:
            return []
        lengths = self._visible(decodes, window)
        order = np.argsort(-lengths, kind="stable")
        cuts, longest = [], lengths[order[0]]
        for place, length in enumerate(lengths[order]):
            if 2 * length < longest and longest - length >= MIN_SAVED_TOKENS:
                cuts.append(place)
                longest = length
        return [np.sort(decodes[part]) for part in np.split(order, cuts)]

    def _decode_group(self, members: Ints, window: int | None) -> DecodeGroup:
        lengths = self._visible(members, window)[:, None]
        longest = int(lengths.max())
        columns = np.arange(longest)[None, :]
        first = self._contexts[members][:, None] - lengths
        slots = self._slots(members[:, None], first + np.minimum(columns, lengths - 1))
        padded = bool((lengths != longest).any())
        return DecodeGroup(
            rows=self._tensor(self._row_starts[members]),
            slots=self._tensor(slots.reshape(-1)),
            num_rows=len(members),
            length=longest,
            mask=self._additive(columns < lengths)[:, None, None, :] if padded else None,
        )

    def _prefill_part(self, sequence: int, window: int | None) -> PrefillPart:
        start, num_tokens = int(self._row_starts[sequence]), int(self._num_tokens[sequence])
        context = int(self._contexts[sequence])
        queries = np.arange(context - num_tokens, context)[:, None]
        first = 0 if window is None else max(0, context - num_tokens - window + 1)
        keys = np.arange(first, context)
        visible = keys[None, :] <= queries
        if window is not None:
            visible &= keys[None, :] > queries - window
        whole = num_tokens == context
        return PrefillPart(
            start=start,
            end=start + num_tokens,
            slots=None if whole else self._tensor(self._slots(np.array(sequence), keys)),
            mask=None if whole and (window is None or window >= context) else self._additive(visible),
        )

    def _additive(self, visible: NDArray[np.bool_]) -> torch.Tensor:
        """0 where visible, minus infinity elsewhere: SDPA would convert a boolean mask in every layer."""
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~visible).to(self._device), float("-inf"))
