"""Figures from text, and rates and quantiles from figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.view import figures
from router.view.scrape import Reading, read
from router.view.window import Sample, Samples, Window, quantile
from telemetry import catalogue
from telemetry.exporter import Exporter

KEY = ("legal", "1")


def gateway_text(calls: int, tokens: int = 0, model: str = "legal", waits: tuple[float, ...] = ()) -> bytes:
    exporter = Exporter(catalogue.GATEWAY)
    requests, completion = exporter.counter(catalogue.REQUESTS), exporter.counter(catalogue.COMPLETION_TOKENS)
    first = exporter.histogram(catalogue.FIRST_TOKEN_S)
    requests.labels(model, "1", "ok").inc(calls)
    requests.labels(model, "1", "disconnect").inc(1)
    completion.labels(model, "1").inc(tokens)
    for wait_s in waits:
        first.labels(model, "1").observe(wait_s)
    return exporter.render()


def window(*texts: bytes, step_s: float = 2.0) -> Window:
    return Window([Sample(100 + step_s * index, {"gateway": read(text)}) for index, text in enumerate(texts)])


def test_outcomes_are_summed_and_kept_apart_where_asked() -> None:
    reading = read(gateway_text(10))
    assert reading.values[figures.REQUESTS] == {KEY: 11}
    assert reading.values[figures.GOOD_REQUESTS] == {KEY: 10}
    assert reading.values[figures.LEFT_REQUESTS] == {KEY: 1}


@given(st.text(max_size=20).filter(lambda text: not set(text) & set("\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")))
def test_any_name_is_read_back_as_it_was_written(name: str) -> None:
    assert read(gateway_text(1, model=name)).values[figures.REQUESTS] == {(name, "1"): 2}


@pytest.mark.parametrize(
    "text", [b"", b"<html>", b"lorafleet_requests_total{", b"\xff\xfe{} 1", b"lorafleet_requests_total{} x"]
)
def test_text_that_is_something_else_has_no_figures(text: bytes) -> None:
    assert read(text) == Reading()


def test_rates_are_growth_over_time() -> None:
    seen = window(gateway_text(10, 100), gateway_text(14, 300))
    assert seen.rates(figures.REQUESTS) == {KEY: 2.0}
    assert seen.rates(figures.TOKENS) == {KEY: 100.0}


def test_series_that_is_new_counts_from_nothing_and_a_new_member_not_at_all() -> None:
    before, after = read(gateway_text(5, model="other")), read(gateway_text(4))
    grown = Window([Sample(0, {"a": before}), Sample(2, {"a": after})])
    assert grown.rates(figures.GOOD_REQUESTS)[KEY] == 2.0
    joined = Window([Sample(0, {}), Sample(2, {"a": after})])
    assert joined.rates(figures.REQUESTS) == {}
    assert joined.values(figures.GOOD_REQUESTS) == {KEY: 4}


def test_member_that_began_anew_counts_from_nothing() -> None:
    assert window(gateway_text(100), gateway_text(6)).rates(figures.GOOD_REQUESTS) == {KEY: 3.0}


def test_quantiles_are_of_the_window_alone() -> None:
    old = (60.0,) * 99
    seen = window(gateway_text(0, waits=old), gateway_text(0, waits=(*old, *(0.2,) * 100)))
    bounds = catalogue.FIRST_TOKEN_S.buckets
    assert 0.1 <= (quantile(seen.buckets(figures.FIRST_TOKEN)[KEY], bounds, 0.99) or 0) <= 0.25


def test_nothing_observed_has_no_quantile() -> None:
    same = gateway_text(1, waits=(1.0,))
    assert window(same, same).buckets(figures.FIRST_TOKEN) == {}
    assert quantile(None, (1.0,), 0.5) is None


def test_quantile_is_linear_within_a_bucket_and_capped_at_the_highest_bound() -> None:
    assert quantile((0.0, 10.0, 10.0), (1.0, 3.0), 0.5) == 2.0
    assert quantile((0.0, 0.0, 10.0), (1.0, 3.0), 0.5) == 3.0


@given(st.lists(st.floats(0.3, 5.0), min_size=1, max_size=400))
def test_samples_are_few_and_windows_as_long_as_they_can_be(steps: list[float]) -> None:
    samples, now_s = Samples(10.0, 60.0), 0.0
    for step_s in steps:
        now_s += step_s
        samples.add(Sample(now_s, {}))
        assert samples.short().span_s <= 10.0
        assert samples.long().span_s <= 60.0
        if now_s - steps[0] > 75.0:
            assert samples.short().span_s >= 5.0
            assert samples.long().span_s >= 45.0
    assert len(samples) <= 20 / 0.3 + 12
