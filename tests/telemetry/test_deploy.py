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
GRID_COLUMNS = 24
KINDS = {"stat", "timeseries", "bargauge", "table"}
UNITS = {"short", "s", "percentunit", "reqps"}
"""Of Grafana's names for units those that are used: one that it does not know is shown as text behind each number."""
COLOURS = {"green", "yellow", "orange", "red", "blue", "purple", "text", "transparent"}
CHOSEN = {"type": "prometheus", "uid": "${datasource}"}
BUILT_IN = {"__rate_interval"}


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


def test_panels_have_ids_titles_and_meanings() -> None:
    found = [*panels(), *rows()]
    assert len(found) > 40
    assert len({panel["id"] for panel in found}) == len(found)
    assert all(isinstance(panel["id"], int) and panel["id"] > 0 and panel["title"] for panel in found)
    assert all(len(panel["description"]) > 5 for panel in panels())


def rows() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]


def test_panels_stay_within_the_grid_and_do_not_overlap() -> None:
    for together in (DASHBOARD["panels"], *(row["panels"] for row in rows())):
        for panel in together:
            place = panel["gridPos"]
            assert place.keys() == {"x", "y", "w", "h"}
            assert all(isinstance(each, int) for each in place.values())
            assert min(place["x"], place["y"]) >= 0 < min(place["w"], place["h"])
            assert place["x"] + place["w"] <= GRID_COLUMNS, panel["title"]
        taken = [cell for panel in together for cell in cells(panel)]
        assert len(taken) == len(set(taken))
    for row in rows():
        assert all(panel["gridPos"]["y"] > row["gridPos"]["y"] for panel in row["panels"]), row["title"]
        assert row["collapsed"] or not row["panels"], "Grafana keeps the panels of an open row beside it"


def test_panels_are_of_known_kinds_and_units() -> None:
    for panel in panels():
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["type"] in KINDS
        assert defaults["unit"] in UNITS
        steps = defaults["thresholds"]["steps"]
        bounds = [step["value"] for step in steps]
        assert bounds[0] is None, f"{panel['title']}: the first colour holds from the lowest value on"
        assert bounds[1:] == sorted(bounds[1:])
        assert {step["color"] for step in steps} <= COLOURS
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0


def test_everything_is_read_from_the_source_that_was_chosen() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    askers = [
        *panels(),
        *DASHBOARD["annotations"]["list"],
        *(one for one in variables.values() if one["type"] == "query"),
    ]
    targets = [target for panel in panels() for target in panel["targets"]]
    assert all(asker["datasource"] == CHOSEN for asker in (*askers, *targets))


def test_every_variable_is_used_and_every_one_that_is_used_is_there() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = {name for query in queries() for name in re.findall(r"\$\{?(\w+)", query)}
    assert used - BUILT_IN == names - {"datasource"}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
            assert label in METRICS[metric].labels or label in FROM_PROMETHEUS


def test_dashboard_can_be_imported_anew_and_again() -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    assert "id" not in DASHBOARD, "a number of some database"
    assert "__inputs" not in DASHBOARD, "the source is a variable"
    assert DASHBOARD["schemaVersion"] == 39


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return {(x, y) for x in columns for y in lines}
