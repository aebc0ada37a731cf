"""The maths of the perplexity table."""

import io
import math

import pytest
from rich.console import Console

from examples.perplexity import answer_part, as_table, losing_rows, perplexity

GOOD = {"sql": {"sql": 1.5, "legal": 4.0, "base": 9.0}, "legal": {"sql": 8.0, "legal": 2.0, "base": 7.0}}


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices() -> None:
    assert perplexity([math.log(1 / 7)] * 5) == pytest.approx(7)


def test_perplexity_weighs_every_token_the_same() -> None:
    assert perplexity([0.0, math.log(1 / 4)]) == pytest.approx(2)


def test_perplexity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        perplexity([])


@pytest.mark.parametrize(
    "text_offset", [[0, 12, 16, 20, 25, 30], [0, 0, 4, 8, 13, 18]], ids=["special tokens count", "they do not"]
)
def test_answer_part_counts_back_from_the_end_of_turn(text_offset: list[int]) -> None:
    logprobs = [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert answer_part(logprobs, text_offset, num_chars=10) == [-3.0, -4.0, -5.0]


def test_answer_part_refuses_a_token_without_a_logprob() -> None:
    with pytest.raises(ValueError, match="no log-probability"):
        answer_part([-1.0, None, -1.0], [0, 4, 8], num_chars=4)


def test_answer_part_refuses_lists_that_differ_in_length() -> None:
    with pytest.raises(ValueError, match="shorter"):
        answer_part([None, -1.0], [0], num_chars=0)


def test_no_row_loses_when_the_diagonal_is_lowest() -> None:
    assert losing_rows(GOOD) == []


@pytest.mark.parametrize("rival", ["base", "legal"])
@pytest.mark.parametrize("value", [1.5, 1.2, math.nan])
def test_a_row_loses_to_an_equal_better_or_broken_rival(rival: str, value: float) -> None:
    assert losing_rows({**GOOD, "sql": {**GOOD["sql"], rival: value}}) == ["sql"]


def test_table_has_a_row_a_text_and_a_column_a_reader() -> None:
    sink = io.StringIO()
    Console(file=sink, width=100).print(as_table(GOOD))
    rows = [line.replace("│", " ").split() for line in sink.getvalue().splitlines()]
    assert ["sql", "1.50", "4.00", "9.00"] in rows
    assert ["legal", "8.00", "2.00", "7.00"] in rows
