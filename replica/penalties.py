"""Scores from logits: biases and penalties, for all the rows that have them in a few gathers and scatters."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from replica.device_link import DeviceLink
from replica.messages import SamplingParams


class History(Protocol):
    """The tokens of a row so far, the prompt's first."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_prompt(self) -> int: ...


@dataclass(slots=True)
class _Entries:
    """Places in the flattened scores, each at most once, and a value for each."""

    places: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def apply(
        self, flat: torch.Tensor, link: DeviceLink, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        """In place: what `change` makes of the scores at these places and their values."""
        if self.places:
            places = link.send(self.places, torch.int64)
            values = link.send(self.values, flat.dtype)
            flat.index_copy_(0, places, change(flat.index_select(0, places), values))


def shape_scores(
    logits: torch.Tensor, shaped: Sequence[tuple[int, SamplingParams, History]], link: DeviceLink
) -> torch.Tensor:
    """The scores after the biases and penalties of `shaped`, (row, settings, history); the logits if it is empty.

    OpenAI's bias, presence and frequency penalties; Keskar et al. 2019 for repetition. Presence and frequency look at
    what was generated, repetition at the prompt as well.
    """
    if not shaped:
        return logits
    biases, repeated, used = _Entries(), _Entries(), _Entries()
    for row, params, history in shaped:
        start = row * logits.shape[-1]
        _note_biases(biases, start, params)
        _note_repeated(repeated, start, params, history)
        _note_used(used, start, params, history)
    scores = logits.clone()
    flat = scores.view(-1)
    biases.apply(flat, link, torch.add)
    repeated.apply(flat, link, lambda scores, factor: torch.where(scores > 0, scores / factor, scores * factor))
    used.apply(flat, link, torch.sub)
    return scores


def _note_biases(entries: _Entries, start: int, params: SamplingParams) -> None:
    entries.places += [start + token_id for token_id in params.logit_bias]
    entries.values += params.logit_bias.values()


def _note_repeated(entries: _Entries, start: int, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1.0:
        places = [start + token_id for token_id in set(history.tokens)]
        entries.places += places
        entries.values += [params.repetition_penalty] * len(places)


def _note_used(entries: _Entries, start: int, params: SamplingParams, history: History) -> None:
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(history.tokens[history.num_prompt :])
        entries.places += [start + token_id for token_id in counts]
        entries.values += [params.presence_penalty + params.frequency_penalty * n for n in counts.values()]
