"""Series are what was counted, one at a time or many at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.series import Histogram

BOUNDS = (0.01, 0.1, 1.0)
VALUES = st.lists(st.sampled_from((0.0, 0.005, 0.01, 0.02, 0.1, 0.5, 1.0, 7.0)) | st.floats(0, 100))


@given(VALUES, VALUES)
def test_many_observed_at_once_are_as_each_by_itself(first: list[float], later: list[float]) -> None:
    one, many = Histogram(BOUNDS), Histogram(BOUNDS)
    for value in first + later:
        one.observe(value)
    many.observe_all(first)
    many.observe_all(later)
    assert many.counts == one.counts
    assert many.total == pytest.approx(one.total)
