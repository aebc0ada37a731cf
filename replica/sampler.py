"""From logits to tokens. Knows sampling settings and token histories, not requests, slots or caches."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from replica.messages import SamplingParams, TokenLogprob

MIN_TEMPERATURE = 1e-5
"""Below this a distribution has only its mode left, and dividing by it would overflow: greedy."""

FIRST_NUCLEUS_WIDTH = 256
SEED_MASK = (1 << 63) - 1


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
        best, token_ids = scores.max(dim=-1)
        random_rows = [index for index, row in enumerate(rows) if not row.chooser.is_greedy]
        if random_rows:
            choosers = [rows[index].chooser for index in random_rows]
            picked = torch.tensor(random_rows, device=logits.device)
            token_ids[picked] = self._draw(scores[picked], best[picked], choosers)
        chosen = token_ids.tolist()
        logprobs = _chosen_logprobs(logits, rows, chosen)
        finite = best.isfinite().tolist()
        return [Chosen(*each) for each in zip(chosen, finite, logprobs, strict=True)]

    def _draw(self, scores: torch.Tensor, best: torch.Tensor, choosers: list[Chooser]) -> torch.Tensor:
        """Invert the cumulative distribution at one uniform number a row: cheap, and the same in any batch."""
        temperatures = _column([chooser.params.temperature for chooser in choosers], scores)
        scores = (scores - best[:, None]).div_(temperatures)
        _filter(scores, [chooser.params for chooser in choosers])
        mass = scores.exp_().cumsum(dim=-1, dtype=torch.float64)
        total = mass[:, -1:]
        target = torch.minimum(self._uniform(choosers).to(mass.device) * total, total.nextafter(total.new_zeros(())))
        return torch.searchsorted(mass, target, right=True).squeeze(-1).clamp_(max=scores.shape[-1] - 1)

    def _uniform(self, choosers: list[Chooser]) -> torch.Tensor:
        """Float64 [rows, 1] in [0, 1): from the choice's own stream if it is seeded, else from the shared one."""
        uniform = torch.rand(len(choosers), 1, dtype=torch.float64, generator=self._shared)
        for index, chooser in enumerate(choosers):
            if chooser.generator is not None:
                uniform[index].uniform_(generator=chooser.generator)
        return uniform


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


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
        seen = torch.tensor(sorted(set(row.tokens)), device=device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.tokens[row.num_prompt :])
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        used = torch.tensor(list(counts), dtype=torch.int64, device=device)
        scores[used] -= torch.tensor(penalties, dtype=scores.dtype, device=device)


def _filter(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """In place: set to -inf what top_k, then top_p, then min_p leave out. Scores have maximum 0; ties stay together."""
    _apply(scores, params, [each.top_k > 0 for each in params], _top_k_floor)
    _apply(scores, params, [each.top_p < 1 for each in params], _nucleus_floor)
    _apply(scores, params, [each.min_p > 0 for each in params], _min_p_floor)


def _apply(scores: torch.Tensor, params: Sequence[SamplingParams], wanted: list[bool], floor: "_Floor") -> None:
    picked = [index for index, want in enumerate(wanted) if want]
    if len(picked) == len(params):
        scores.masked_fill_(scores < floor(scores, params), -math.inf)
    elif picked:
        index = torch.tensor(picked, device=scores.device)
        part = scores[index]
        lowest = floor(part, [params[each] for each in picked])
        scores[index] = part.masked_fill_(part < lowest, -math.inf)


class _Floor(Protocol):
    """The lowest score that stays, [rows, 1], for scores [rows, vocabulary]."""

    def __call__(self, scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor: ...


def _top_k_floor(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    sizes = [min(each.top_k, scores.shape[-1]) for each in params]
    last = torch.tensor(sizes, device=scores.device)[:, None] - 1
    return scores.topk(max(sizes), dim=-1).values.gather(-1, last)


def _nucleus_floor(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The score of the token with which the most likely ones reach `top_p` (Holtzman et al. 2020).

    A few hundred tokens nearly always do; the search widens only when they do not, since sorting a vocabulary is slow.
    """
    goal = scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    goal *= torch.tensor([each.top_p for each in params], dtype=torch.float64, device=scores.device)[:, None]
    vocab_size, width = scores.shape[-1], FIRST_NUCLEUS_WIDTH
    while True:
        top = scores.topk(min(width, vocab_size), dim=-1).values
        short = top.exp().cumsum(dim=-1, dtype=torch.float64) < goal
        if width >= vocab_size or not bool(short[:, -1].any()):
            return top.gather(-1, short.sum(dim=-1, keepdim=True).clamp_(max=top.shape[-1] - 1))
        width *= 8


def _min_p_floor(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    return _column([math.log(each.min_p) for each in params], scores)


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
