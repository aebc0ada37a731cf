"""Rules and dashboard name only metrics, labels and recorded series that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from telemetry.catalogue import PROCESSES

DEPLOY = Path(__file__).parents[2] / "deploy"
METRICS = {name: metric for metrics in PROCESSES.values() for metric in metrics for name in metric.sample_names}
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "lorafleet.json").read_text())
FROM_PROMETHEUS = {"le", "instance", "__name__"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def panels(found: list[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
    """Every panel, those in collapsed rows included; no rows."""
    for panel in DASHBOARD["panels"] if found is None else found:
        if panel["type"] == "row":
            yield from panels(panel["panels"])
        else:
            yield panel


def queries() -> list[str]:
    of_panels = [target["expr"] for panel in panels() for target in panel["targets"]]
    return of_panels + [rule["expr"] for rule in rules()] + [each["expr"] for each in DASHBOARD["annotations"]["list"]]


def test_every_series_in_a_query_is_exported_or_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in queries():
        named = set(re.findall(r"\blorafleet[a-z0-9_:]*", query))
        assert named, query
        assert named <= METRICS.keys() | recorded, query


def test_every_label_in_a_query_is_one_of_its_metrics() -> None:
    for query in queries():
        named = re.findall(r"\blorafleet_[a-z_]+", query)
        allowed = FROM_PROMETHEUS.union(*(METRICS[name].labels for name in named)) if named else set()
        used = set(re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", query))
        for group in re.findall(r"(?:by|on|group_left) \(([a-z_, ]*)\)", query):
            used |= {label.strip() for label in group.split(",") if label.strip()}
        assert not named or used <= allowed, (query, used - allowed)


def test_legends_use_labels_that_the_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"\b{label}\b", target["expr"]), (panel["title"], label)


def test_every_alert_is_tried_by_promtool_and_says_what_to_do() -> None:
    tried = (DEPLOY / "prometheus" / "rules_test.yaml").read_text()
    for rule in rules():
        if "alert" in rule:
            assert f"alertname: {rule['alert']}\n" in tried
            assert rule["annotations"].keys() == {"summary", "description"}
            assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_panels_have_ids_titles_and_meanings_and_do_not_overlap() -> None:
    found = list(panels())
    assert len(found) > 35
    assert len({panel["id"] for panel in found}) == len(found)
    assert all(panel["title"] and len(panel["description"]) > 5 for panel in found)
    for row in [{"panels": found[:0]}, *(panel for panel in DASHBOARD["panels"] if panel["type"] == "row")]:
        assert all(
            cells(one).isdisjoint(cells(two)) for one in row["panels"] for two in row["panels"] if one is not two
        )


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return {(x, y) for x in columns for y in lines}
