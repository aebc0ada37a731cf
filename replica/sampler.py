"""From logits to tokens. Knows sampling settings and token histories, not requests, slots or caches."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from replica.messages import SamplingParams, TokenLogprob

MIN_TEMPERATURE = 1e-5
"""Below this a distribution has only its mode left, and dividing by it would overflow: greedy."""

SEED_MASK = (1 << 63) - 1
BLOCK = 128
"""Weights are summed in blocks of this many before they are scanned: a scan over a whole vocabulary is slow."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """How one choice picks its tokens: its settings, sorted once by what they need, and its own random stream."""

    params: SamplingParams
    generator: torch.Generator | None
    is_greedy: bool
    is_shaped: bool
    """Whether penalties or biases change the scores."""

    @classmethod
    def of(cls, params: SamplingParams, index: int) -> "Chooser":
        generator = None
        if params.seed is not None:
            generator = torch.Generator().manual_seed((params.seed + index) & SEED_MASK)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0)
        is_shaped = bool(params.logit_bias) or any(penalties)
        return cls(params, generator, params.temperature < MIN_TEMPERATURE, is_shaped)


class Row(Protocol):
    """One row of logits: who chooses, and the tokens so far (the prompt's first)."""

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


class Sampler:
    """Chooses a token a row. Rows are independent: a neighbour's settings or values never change a row's choice."""

    def __init__(self, seed: int | None = None) -> None:
        self._shared = torch.Generator()
        if seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(seed)

    def choose(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Chosen]:
        """One token for each row of `logits`, float32 [len(rows), vocabulary]."""
        scores = _shape(logits, rows)
        best = scores.amax(dim=-1)
        token_ids = self._token_ids(scores, best, [row.chooser for row in rows])
        chosen = token_ids.tolist()
        logprobs = _chosen_logprobs(logits, rows, chosen)
        finite = best.isfinite().tolist()
        return [Chosen(*each) for each in zip(chosen, finite, logprobs, strict=True)]

    def _token_ids(self, scores: torch.Tensor, best: torch.Tensor, choosers: Sequence[Chooser]) -> torch.Tensor:
        drawn = [index for index, chooser in enumerate(choosers) if not chooser.is_greedy]
        if not drawn:
            return scores.argmax(dim=-1)
        rows = torch.tensor(drawn, device=scores.device)
        found = self._draw(_select(scores, rows), best[rows], [choosers[index] for index in drawn])
        if len(drawn) == len(choosers):
            return found
        return scores.argmax(dim=-1).index_copy_(0, rows, found)

    def _draw(self, scores: torch.Tensor, best: torch.Tensor, choosers: Sequence[Chooser]) -> torch.Tensor:
        """Token ids [rows]: what top_k, then top_p, then min_p leave, drawn by weight. Equal scores stay together."""
        params = [chooser.params for chooser in choosers]
        weights = (scores - best[:, None]).div_(_column([each.temperature for each in params], scores)).exp_()
        _keep_top_k(weights, params)
        total = _total(weights)
        _drop_unlikely(weights, params)
        token_ids = self._pick(weights, choosers)
        pending = [index for index, each in enumerate(params) if each.top_p < 1]
        goal = total * torch.tensor([each.top_p for each in params], dtype=torch.float64, device=total.device)
        while pending:
            pending = self._redraw(weights, goal, token_ids, pending, choosers)
        return token_ids

    def _redraw(
        self,
        weights: torch.Tensor,
        goal: torch.Tensor,
        token_ids: torch.Tensor,
        pending: Sequence[int],
        choosers: Sequence[Chooser],
    ) -> list[int]:
        """Draw again, in place, for those of the rows `pending` whose token is outside the nucleus; returns them.

        The nucleus (Holtzman et al. 2020) is the likeliest tokens up to the one that reaches `goal`: a token is in it
        when those above it weigh less. Rejection needs no sorting; what a rejected token rules out is not drawn again.
        """
        rows = torch.tensor(pending, device=weights.device)
        part = _select(weights, rows)
        drawn = part.gather(-1, token_ids[rows][:, None])
        above = torch.where(part > drawn, part, part.new_zeros(()))
        rejected = (_total(above) >= goal[rows]).nonzero().squeeze(-1)
        again = [pending[index] for index in rejected.tolist()]
        if again:
            weights[rows[rejected]] = above[rejected]
            token_ids[rows[rejected]] = self._pick(above[rejected], [choosers[index] for index in again])
        return again

    def _pick(self, weights: torch.Tensor, choosers: Sequence[Chooser]) -> torch.Tensor:
        """Token ids [rows] by weight: one uniform number a row, looked up in the blocks' sums and then in a block."""
        blocks = _blocks(weights)
        sums = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        block, target = _search(sums, self._uniform(choosers).to(weights.device) * sums[:, -1:])
        rest = target - torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0.0)
        chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1)
        offset, _ = _search(chosen.cumsum(dim=-1, dtype=torch.float64), rest)
        return (block * BLOCK + offset).squeeze(-1).clamp_(max=weights.shape[-1] - 1)

    def _uniform(self, choosers: Sequence[Chooser]) -> torch.Tensor:
        """Float64 [rows, 1] in [0, 1): from the choice's own stream if it is seeded, else from the shared one."""
        uniform = torch.rand(len(choosers), 1, dtype=torch.float64, generator=self._shared)
        for index, chooser in enumerate(choosers):
            if chooser.generator is not None:
                uniform[index].uniform_(generator=chooser.generator)
        return uniform


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _select(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows that `index`, ascending, names; no copy when it names them all."""
    return rows if len(index) == len(rows) else rows.index_select(0, index)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, BLOCK], the last block filled up with zeros."""
    missing = -weights.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, BLOCK)


def _total(weights: torch.Tensor) -> torch.Tensor:
    """Float64 [rows]: each row's sum."""
    return _blocks(weights).sum(dim=-1).sum(dim=-1, dtype=torch.float64)


def _search(sums: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [rows, 1] of the first running sum above `target`, which rounding must not lift to the last sum."""
    total = sums[:, -1:]
    target = torch.minimum(target, total.nextafter(total.new_zeros(())))
    return torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[-1] - 1), target


def _shape(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The scores after biases and penalties; the logits themselves when no row has any."""
    shaped = [index for index, row in enumerate(rows) if row.chooser.is_shaped]
    if not shaped:
        return logits
    scores = logits.clone()
    for index in shaped:
        _shape_row(scores[index], rows[index])
    return scores


def _shape_row(scores: torch.Tensor, row: Row) -> None:
    """In place: OpenAI's bias, presence and frequency penalties; Keskar et al. 2019 for repetition.

    Presence and frequency look at what was generated, repetition at the prompt as well.
    """
    params, device = row.chooser.params, scores.device
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        scores[biased] += torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(row.tokens)), device=device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.tokens[row.num_prompt :])
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        used = torch.tensor(list(counts), dtype=torch.int64, device=device)
        scores[used] -= torch.tensor(penalties, dtype=scores.dtype, device=device)


def _keep_top_k(weights: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """In place: no weight for what is less likely than the k-th likeliest, in the rows with `top_k`."""
    vocab_size = weights.shape[-1]
    picked = [index for index, each in enumerate(params) if 0 < each.top_k < vocab_size]
    if picked:
        rows = torch.tensor(picked, device=weights.device)
        last = torch.tensor([params[index].top_k for index in picked], device=weights.device)[:, None] - 1
        part = _select(weights, rows)
        floor = part.topk(max(params[index].top_k for index in picked), dim=-1).values.gather(-1, last)
        weights[rows] = torch.where(part < floor, part.new_zeros(()), part)


def _drop_unlikely(weights: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """In place: no weight below `min_p`; the likeliest weighs 1."""
    if any(each.min_p for each in params):
        weights.masked_fill_(weights < _column([each.min_p for each in params], weights), 0.0)


def _chosen_logprobs(logits: torch.Tensor, rows: Sequence[Row], chosen: list[int]) -> list[TokenLogprob | None]:
    wanted = [index for index, row in enumerate(rows) if row.chooser.params.logprobs is not None]
    if not wanted:
        return [None] * len(rows)
    numbers = [rows[index].chooser.params.logprobs or 0 for index in wanted]
    picked = logits[torch.tensor(wanted, device=logits.device)]
    found = dict(zip(wanted, token_logprobs(picked, [chosen[index] for index in wanted], numbers), strict=True))
    return [found.get(index) for index in range(len(rows))]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability, over the raw distribution, of `token_ids[i]` and of the `num_top[i]` likeliest in row i."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None]).squeeze(-1).tolist()
    if not any(num_top):
        return [TokenLogprob(*each) for each in zip(token_ids, own, strict=True)]
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    likeliest = zip(top.indices.tolist(), top.values.tolist(), num_top, strict=True)
    tops = [tuple(zip(ids[:k], values[:k], strict=True)) for ids, values, k in likeliest]
    return [TokenLogprob(*each) for each in zip(token_ids, own, tops, strict=True)]
