"""The catalogue of metrics and its page say the same."""

import re
from pathlib import Path

import pytest

from telemetry.catalogue import PROCESSES
from telemetry.metric import Metric

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ALL = [metric for metrics in PROCESSES.values() for metric in metrics]


def documented(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def row(metric: Metric) -> list[str]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return [f"`{metric.shown_name}`", metric.kind, labels, metric.unit, metric.text]


@pytest.mark.parametrize("title", PROCESSES)
def test_page_lists_what_a_process_exports_and_nothing_else(title: str) -> None:
    assert documented(title) == [row(metric) for metric in PROCESSES[title]]


def test_page_names_no_metric_elsewhere_that_is_not_there() -> None:
    named = set(re.findall(r"lorafleet_[a-z_]+", PAGE))
    assert named == {metric.shown_name for metric in ALL}


def test_names_are_unique_and_say_their_unit() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert re.fullmatch(r"lorafleet_(gateway|replica|registry|adapter|tenant|requests)(_[a-z]+)*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info_info")), metric.name
        for unit in ("seconds", "bytes"):
            assert (metric.unit == unit) == metric.name.endswith(f"_{unit}"), metric.name


def test_histograms_alone_have_buckets() -> None:
    assert all((metric.kind == "histogram") == bool(metric.buckets) for metric in ALL)
