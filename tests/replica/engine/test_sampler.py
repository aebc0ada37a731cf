"""The vectorised sampler against a slow and plain one, and rows against their neighbours."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.device_link import DeviceLink, HostLink
from replica.filters import BLOCK, floors_by_bits, floors_by_sorting, total
from replica.logprobs import score_rows
from replica.messages import SamplingParams
from replica.sampler import Chooser, Chosen, Sampler, UniformStream
from tests.fake_device import FakeLink, on_device

VOCAB_SIZE = 40

on_both_links = pytest.mark.parametrize("make_link", [HostLink, FakeLink])
"""Where the logits are on the host, and where nothing may be read before the sampling is fetched."""


@dataclass
class FakeRow:
    chooser: Chooser
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_prompt: int = 3


def choose(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[FakeRow], make_link: type[DeviceLink] = HostLink
) -> list[Chosen]:
    """Launch and read; on a fake device any other look at a value is an error."""
    is_here = make_link is HostLink
    return sampler.launch(logits if is_here else on_device(logits), rows, make_link()).read()


def row(tokens: Sequence[int] = (1, 2, 3), num_prompt: int = 3, **fields: Any) -> FakeRow:
    return FakeRow(Chooser.of(SamplingParams(max_tokens=1, **fields), 0), list(tokens), num_prompt)


def logits_of(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def plain_distribution(logits: torch.Tensor, row: FakeRow) -> np.ndarray:
    """The probabilities that `row` must draw from, one token at a time in float64."""
    params, scores = row.chooser.params, logits.double().numpy().copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(row.tokens):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(row.tokens[row.num_prompt :]).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    if row.chooser.is_greedy:
        return np.eye(len(scores))[scores.argmax()]
    weights = np.exp((scores - scores.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = list(order[: params.top_k] if params.top_k else order)
    total, mass, nucleus = weights[kept].sum(), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weights[token]
        if mass >= params.top_p * total:
            break
    final = [token for token in nucleus if weights[token] >= params.min_p * weights.max()]
    result = np.zeros(len(scores))
    result[final] = weights[final] / weights[final].sum()
    return result


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 5},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"top_k": 1},
    {"top_k": 1000, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 7, "top_p": 0.6, "temperature": 1.7},
    {"top_p": 0.9, "min_p": 0.25, "temperature": 2.0},
    {"logit_bias": {4: 5.0, 5: -100.0}},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "tokens": [1, 2, 3, 7, 7, 8]},
    {"repetition_penalty": 1.8, "tokens": [1, 2, 3, 7, 7, 8]},
    {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 2.0, "tokens": [1, 2, 3, 9]},
]


@on_both_links
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_draws_follow_the_plain_distribution(fields: dict[str, Any], make_link: type[DeviceLink]) -> None:
    num_draws = 4000
    logits, subject = logits_of(1), row(**fields)
    expected = plain_distribution(logits[0], subject)
    chosen = choose(Sampler(seed=1), logits.expand(num_draws, -1), [subject] * num_draws, make_link)
    seen = np.bincount([each.token_id for each in chosen], minlength=VOCAB_SIZE) / num_draws
    assert not seen[expected == 0].any()
    assert np.abs(seen - expected).max() < 4.5 * math.sqrt(0.25 / num_draws)


@on_both_links
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(range(len(SETTINGS))), min_size=2, max_size=8))
def test_a_row_chooses_the_same_alone_and_in_any_batch(
    make_link: type[DeviceLink], seed: int, picks: list[int]
) -> None:
    logits = logits_of(len(picks), seed)

    def rows() -> list[FakeRow]:
        return [row(**SETTINGS[pick], seed=seed + index, logprobs=index % 3) for index, pick in enumerate(picks)]

    together = choose(Sampler(), logits, rows(), make_link)
    alone = [choose(Sampler(), logits[index : index + 1], [each], make_link)[0] for index, each in enumerate(rows())]
    backwards = choose(Sampler(), logits.flip(0), rows()[::-1], make_link)[::-1]
    assert [each.token_id for each in together] == [each.token_id for each in alone]
    assert [each.token_id for each in together] == [each.token_id for each in backwards]
    for first, second in zip(together, alone, strict=True):
        assert first.logprob is not None
        assert second.logprob is not None
        assert first.logprob.logprob == pytest.approx(second.logprob.logprob, abs=1e-6)
        assert [token for token, _ in first.logprob.top] == [token for token, _ in second.logprob.top]


@on_both_links
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_the_logits_are_left_as_they_were(fields: dict[str, Any], make_link: type[DeviceLink]) -> None:
    logits = logits_of(3)
    before = logits.clone()
    choose(Sampler(seed=0), logits, [row(**fields), row(), row(temperature=0.0)], make_link)
    assert torch.equal(logits, before)


@on_both_links
def test_a_broken_neighbour_changes_nothing_and_is_told_apart(make_link: type[DeviceLink]) -> None:
    logits = logits_of(4)
    rows = [row(seed=1, top_p=0.8), row(seed=2, top_k=3), row(seed=3), row(temperature=0.0)]
    expected = [each.token_id for each in choose(Sampler(), logits, rows, make_link)]
    for bad in (float("nan"), float("inf")):
        broken = torch.cat([logits, torch.full((1, VOCAB_SIZE), bad)])
        rows = [row(seed=1, top_p=0.8), row(seed=2, top_k=3), row(seed=3), row(temperature=0.0)]
        chosen = choose(Sampler(), broken, [*rows, row(top_p=0.5, top_k=2, min_p=0.1, seed=4)], make_link)
        assert [each.token_id for each in chosen[:4]] == expected
        assert [each.is_finite for each in chosen] == [True] * 4 + [False]


def test_one_nan_in_a_row_is_found() -> None:
    logits = logits_of(2)
    logits[1, 17] = float("nan")
    assert [each.is_finite for each in choose(Sampler(), logits, [row(temperature=0.0)] * 2)] == [True, False]


@on_both_links
def test_minus_infinity_is_never_drawn(make_link: type[DeviceLink]) -> None:
    logits = torch.full((500, VOCAB_SIZE), -math.inf)
    logits[:, [3, 30]] = 1.0
    chosen = choose(Sampler(seed=0), logits, [row()] * 500, make_link)
    assert {each.token_id for each in chosen} == {3, 30}
    assert all(each.is_finite for each in chosen)


@on_both_links
@pytest.mark.parametrize("vocab_size", [BLOCK - 1, BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.999999, 1.0])
def test_a_flat_distribution_over_many_blocks(top_p: float, vocab_size: int, make_link: type[DeviceLink]) -> None:
    logits = logits_of(1, vocab_size=vocab_size, scale=0.5)
    expected = plain_distribution(logits[0], row(top_p=top_p))
    num_draws = 4000
    chosen = choose(Sampler(seed=0), logits.expand(num_draws, -1), [row(top_p=top_p)] * num_draws, make_link)
    seen = np.bincount([each.token_id for each in chosen], minlength=vocab_size) / num_draws
    assert not seen[expected == 0].any()
    deviation = np.sqrt(np.maximum(expected * (1 - expected), 1 / num_draws) / num_draws)
    assert (np.abs(seen - expected) < 5.5 * deviation).all()


@on_both_links
def test_equal_scores_stay_together(make_link: type[DeviceLink]) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :6] = 5.0
    for fields in ({"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.9}):
        chosen = choose(Sampler(seed=0), logits.expand(400, -1), [row(**fields)] * 400, make_link)
        assert {each.token_id for each in chosen} == set(range(6)), fields


def test_seeds_repeat_and_differ() -> None:
    logits = logits_of(1, scale=0.1)

    def draws(seed: int, index: int = 0) -> list[int]:
        subject = FakeRow(Chooser.of(SamplingParams(max_tokens=1, seed=seed), index))
        sampler = Sampler()
        return [choose(sampler, logits, [subject])[0].token_id for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(5, index=1) == draws(6)
    assert draws(-1) == draws(-1)
    assert draws(2**64 + 3) == draws(3)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = logits_of(1) * 1000
    for temperature in (0.0, 1e-30, 1e-6):
        chosen = choose(Sampler(), logits, [row(temperature=temperature)])[0]
        assert chosen.token_id == int(logits.argmax())
        assert chosen.is_finite


@on_both_links
def test_logprobs_are_of_the_raw_distribution(make_link: type[DeviceLink]) -> None:
    logits = logits_of(2)
    rows = [row(logprobs=3, temperature=0.2, logit_bias={0: 50.0}), row(temperature=0.0)]
    first, second = choose(Sampler(seed=0), logits, rows, make_link)
    raw = logits[0].log_softmax(-1)
    assert second.logprob is None
    assert first.logprob is not None
    assert first.token_id == first.logprob.token_id == 0
    assert first.logprob.logprob == pytest.approx(float(raw[0]), abs=1e-6)
    values, ids = raw.topk(3)
    assert first.logprob.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))


@given(st.lists(st.integers(0, VOCAB_SIZE + 5), min_size=1, max_size=6))
def test_each_row_gets_the_number_of_likeliest_it_asked_for(num_top: list[int]) -> None:
    logits = logits_of(len(num_top))
    found = score_rows(logits, torch.full((len(num_top),), 7), num_top, HostLink()).read([7] * len(num_top))
    assert [len(each.top) for each in found] == [min(k, VOCAB_SIZE) for k in num_top]
    assert all(each.token_id == 7 for each in found)


@pytest.mark.parametrize("kind", ["normal", "flat", "steps", "zeros", "one"])
@pytest.mark.parametrize("vocab_size", [3, BLOCK, 1000])
def test_both_searches_find_the_same_floor(kind: str, vocab_size: int) -> None:
    weights = weights_of(kind, vocab_size)
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999):
        goals = total(weights) * top_p
        floors = floors_by_bits(weights, goals)
        inside = weights >= floors[:, None]
        assert torch.equal(inside, weights >= floors_by_sorting(weights, goals)[:, None])
        lightest = torch.where(inside, weights, torch.inf).amin(dim=-1, keepdim=True)
        above = torch.where(weights > lightest, weights, 0.0)
        assert (total(above) < goals).all()
        assert (total(torch.where(inside, weights, 0.0)) >= goals * (1 - 1e-6)).all()


def weights_of(kind: str, vocab_size: int) -> torch.Tensor:
    """Weights of 5 rows whose likeliest weighs 1."""
    scores = logits_of(5, seed=3, vocab_size=vocab_size)
    if kind == "flat":
        scores = torch.zeros_like(scores)
    if kind == "steps":
        scores = scores.round()
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    if kind == "zeros":
        weights[:, ::2] = 0.0
        weights[:, 1] = 1.0
    if kind == "one":
        weights = torch.zeros_like(weights)
        weights[:, 1] = 1.0
    return weights


def test_a_stream_gives_the_numbers_of_its_generator_one_by_one() -> None:
    generator, stream = torch.Generator().manual_seed(5), UniformStream(5)
    numbers = [float(torch.rand(1, dtype=torch.float64, generator=generator)) for _ in range(200)]
    assert [stream.next() for _ in range(200)] == numbers


def test_sampled_tokens_are_on_the_device_before_they_are_read() -> None:
    logits, rows = on_device(logits_of(3)), [row(seed=1), row(temperature=0.0), row(seed=2, top_p=0.5)]
    sampling = Sampler().launch(logits, rows, FakeLink())
    on_host = sampling.token_ids.as_subclass(torch.Tensor).tolist()
    assert on_host == [each.token_id for each in sampling.read()]
