"""Requests by alias while uploads move it, over two replicas whose slots are fewer than the versions."""

from pathlib import Path

import pytest

from tests.reload_race import check, in_one_process


@pytest.mark.parametrize("num_requests", [200, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_no_answer_is_of_a_version_that_the_alias_did_not_stand_for(
    tiny_base: Path, tmp_path: Path, num_requests: int
) -> None:
    figures = await in_one_process(tiny_base, tmp_path, num_requests)
    check(figures)
    assert figures["requests"] == num_requests
