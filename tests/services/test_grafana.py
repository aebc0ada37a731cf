"""The dashboard against Grafana's own schema of dashboards, as its foundation SDK has it in Python."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.telemetry.test_deploy import DASHBOARD, panels

pytestmark = pytest.mark.services
OF_PROMETHEUS = {"/templating/list/definition", "/annotations/list/titleFormat", "/annotations/list/step"}
"""Fields that Grafana writes itself and its schema leaves to the data source."""


def test_every_field_is_one_of_the_schema_and_means_what_it_says() -> None:
    """Fields that are misspelt, misplaced or of another panel's type are lost on the way through the schema."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="no grafana-foundation-sdk here")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    through = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(DASHBOARD)))
    assert set(lost(DASHBOARD, through)) == OF_PROMETHEUS


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where ours says something that theirs does not; what theirs has besides are defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name in theirs:
                yield from lost(value, theirs[name], f"{path}/{name}")
            else:
                yield f"{path}/{name}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for one, other in zip(ours, theirs, strict=True):
            yield from lost(one, other, path)
    elif ours != theirs:
        yield path


def test_misspelt_field_would_be_found() -> None:
    panel = next(panels())
    assert list(lost({**panel, "targts": []}, panel)) == ["/targts"]
