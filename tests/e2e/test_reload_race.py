"""Requests by alias while uploads move it, over two replicas whose slots are fewer than the versions."""

from pathlib import Path

import pytest

from tests.reload_race import AliasHistory, check, in_one_process


def test_history_allows_what_the_alias_could_stand_for_and_nothing_else() -> None:
    history = AliasHistory(clock=iter((2.0, 6.0)).__next__)
    history.asked(1.0, "first")
    history.settled()
    history.asked(5.0, "second")
    history.settled()
    assert history.allowed(3.0, 4.0) == {"first"}
    assert history.allowed(4.0, 5.5) == {"first", "second"}
    assert history.allowed(6.5, 7.0) == {"second"}
    assert history.allowed(0.0, 0.5) == set()


@pytest.mark.parametrize("num_requests", [200, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_no_answer_is_of_a_version_that_the_alias_did_not_stand_for(
    tiny_base: Path, tmp_path: Path, num_requests: int
) -> None:
    figures = await in_one_process(tiny_base, tmp_path, num_requests)
    check(figures)
    assert figures["requests"] == num_requests
