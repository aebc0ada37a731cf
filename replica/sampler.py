"""From logits to tokens. Knows sampling settings and token histories, not requests, slots or caches.

`Sampler.launch` queues the work on the logits' device and waits for nothing; `Sampling.read` waits for its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from replica.device_link import DeviceLink, Fetched
from replica.filters import BLOCK, as_blocks, drop_unlikely, select
from replica.logprobs import ScoredRows, score_rows
from replica.messages import SamplingParams, TokenLogprob
from replica.penalties import shape_scores

MIN_TEMPERATURE = 1e-5
"""Below this a distribution has only its mode left, and dividing by it would overflow: greedy."""

SEED_MASK = (1 << 63) - 1
NOT_FINITE = -1


class UniformStream:
    """Numbers in [0, 1), float64, drawn ahead in small lots: a call to a generator costs more than the number."""

    LOT = 64

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed & SEED_MASK)
        self._ahead: list[float] = []

    def next(self) -> float:
        if not self._ahead:
            lot = torch.rand(self.LOT, dtype=torch.float64, generator=self._generator)
            self._ahead = lot.tolist()[::-1]
        return self._ahead.pop()


@dataclass(frozen=True, slots=True)
class Chooser:
    """How one choice picks its tokens: its settings, sorted once by what they need, and its own random stream."""

    params: SamplingParams
    stream: UniformStream | None
    is_greedy: bool
    is_shaped: bool
    """Whether penalties or biases change the scores."""
    needs_history: bool
    """Whether the scores depend on the tokens so far, so that the last one must be known on the host."""

    @classmethod
    def of(cls, params: SamplingParams, index: int) -> "Chooser":
        is_greedy = params.temperature < MIN_TEMPERATURE
        stream = None if params.seed is None or is_greedy else UniformStream(params.seed + index)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0)
        needs_history = any(penalties)
        return cls(params, stream, is_greedy, needs_history or bool(params.logit_bias), needs_history)


class Row(Protocol):
    """One row of logits: who chooses, and the tokens so far (the prompt's first).

    The last token may be missing from `tokens` unless the chooser needs the history.
    """

    @property
    def chooser(self) -> Chooser: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_prompt(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sampled token. `is_finite` is false when the row held NaN or had no finite maximum: then it means nothing."""

    token_id: int
    is_finite: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Tokens that are being chosen: `token_ids` int64 [rows] on the device, good as inputs of later work there."""

    token_ids: torch.Tensor
    found: Fetched
    scored: ScoredRows | None
    scored_rows: list[int]

    def read(self) -> list[Chosen]:
        """One a row; waits until the device has chosen."""
        (found,) = self.found.lists()
        if self.scored is None:
            return [Chosen(token_id, token_id != NOT_FINITE) for token_id in found]
        logprobs = self.scored.read([found[row] for row in self.scored_rows])
        by_row = dict(zip(self.scored_rows, logprobs, strict=True))
        return [Chosen(token_id, token_id != NOT_FINITE, by_row.get(row)) for row, token_id in enumerate(found)]


class Sampler:
    """Chooses a token a row. Rows are independent: a neighbour's settings or values never change a row's choice."""

    def __init__(self, seed: int | None = None) -> None:
        self._shared = UniformStream(seed)

    def launch(self, logits: torch.Tensor, rows: Sequence[Row], link: DeviceLink) -> Sampling:
        """Begin to choose a token for each row of `logits`, float32 [len(rows), vocabulary], which are left alone."""
        choosers = [row.chooser for row in rows]
        shaped = [(index, row.chooser.params, row) for index, row in enumerate(rows) if row.chooser.is_shaped]
        scores = shape_scores(logits, shaped, link)
        best, token_ids = scores.max(dim=-1)
        token_ids = self._token_ids(scores, best, token_ids, choosers, link)
        found = link.fetch(torch.where(best.abs() < torch.inf, token_ids, NOT_FINITE))
        wanted = [index for index, each in enumerate(choosers) if each.params.logprobs is not None]
        return Sampling(token_ids, found, _score(logits, token_ids, wanted, choosers, link), wanted)

    def _token_ids(
        self,
        scores: torch.Tensor,
        best: torch.Tensor,
        likeliest: torch.Tensor,
        choosers: Sequence[Chooser],
        link: DeviceLink,
    ) -> torch.Tensor:
        drawn = [index for index, chooser in enumerate(choosers) if not chooser.is_greedy]
        if not drawn:
            return likeliest
        if len(drawn) == len(choosers):
            return self._draw(scores, best, choosers, link)
        rows = link.send(drawn, torch.int64)
        found = self._draw(select(scores, rows), best[rows], [choosers[index] for index in drawn], link)
        return likeliest.index_copy_(0, rows, found)

    def _draw(
        self, scores: torch.Tensor, best: torch.Tensor, choosers: Sequence[Chooser], link: DeviceLink
    ) -> torch.Tensor:
        """Token ids [rows]: what top_k, then top_p, then min_p leave, drawn by weight. Equal scores stay together."""
        params = [chooser.params for chooser in choosers]
        settings = link.send([self._uniform(choosers), [each.temperature for each in params]], torch.float64)
        is_on_cuda = scores.device.type == "cuda"
        if is_on_cuda and not any(each.top_k or each.top_p < 1 or each.min_p for each in params):
            return draw_on_cuda(scores, best, settings, are_scores=True)
        weights = (scores - best[:, None]).div_(settings[1][:, None].to(scores.dtype)).exp_()
        drop_unlikely(weights, params, link)
        if is_on_cuda:
            return draw_on_cuda(weights, best, settings, are_scores=False)
        return pick(weights, settings[0][:, None])

    def _uniform(self, choosers: Sequence[Chooser]) -> list[float]:
        """A number a row: from the choice's own stream if it is seeded, else from the shared one."""
        return [(chooser.stream or self._shared).next() for chooser in choosers]


def draw_on_cuda(values: torch.Tensor, best: torch.Tensor, settings: torch.Tensor, *, are_scores: bool) -> torch.Tensor:
    """What `pick` does and, with `are_scores`, weighs before, in one launch: see `replica.kernels.draw.draw`."""
    from replica.kernels.draw import draw  # Triton exists beside CUDA only

    token_ids: torch.Tensor = draw(values, best, settings, are_scores=are_scores)
    return token_ids


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [rows] by weight: float64 `uniform` [rows, 1] is looked up in the blocks' sums and then in a block."""
    blocks = as_blocks(weights)
    sums = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    block, target = _search(sums, uniform * sums[:, -1:])
    rest = target - torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1)
    offset, _ = _search(chosen.cumsum(dim=-1, dtype=torch.float64), rest)
    return (block * BLOCK + offset).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _search(sums: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [rows, 1] of the first running sum above `target`, which rounding must not lift to the last sum."""
    total = sums[:, -1:]
    target = torch.minimum(target, total.nextafter(total.new_zeros(())))
    return torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[-1] - 1), target


def _score(
    logits: torch.Tensor, token_ids: torch.Tensor, wanted: list[int], choosers: Sequence[Chooser], link: DeviceLink
) -> ScoredRows | None:
    if not wanted:
        return None
    rows = link.send(wanted, torch.int64)
    numbers = [choosers[index].params.logprobs or 0 for index in wanted]
    return score_rows(logits.index_select(0, rows), token_ids.index_select(0, rows), numbers, link)
