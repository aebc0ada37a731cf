"""Configuration from YAML, environment and code: one model, and every mistake has a name."""

import sys

import pytest

from cluster.config import ConfigError, load_fleet, load_registry
from registry.demand import DemandConfig
from telemetry.traces import TraceConfig, TracesUnavailable, open_tracer

ARGS = {"replica": {"model": {"base": "some/base"}}}


def test_environment_wins_over_yaml() -> None:
    args = {"replica": {"model": {"base": "some/base"}, "adapters": {"max_slots": 4}}}
    environ = {"LORAFLEET_REPLICA__ADAPTERS__MAX_SLOTS": "12", "LORAFLEET_URL": "http://x", "PATH": "/bin"}
    config = load_fleet(args, environ)
    assert config.replica.adapters.max_slots == 12
    assert config.replica.model.base == "some/base"


def test_registry_takes_its_own_section_of_the_environment() -> None:
    environ = {"LORAFLEET_REGISTRY__LEASE_TTL_S": "5", "LORAFLEET_REPLICA__MODEL__BASE": "x"}
    assert load_registry({}, environ).lease_ttl_s == 5
    assert load_fleet(ARGS, environ).replica.model.base == "x"


def test_load_bound_is_never_above_the_rows_of_a_replica() -> None:
    few = {"replica": {"model": {"base": "b"}, "scheduler": {"max_num_seqs": 4}}}
    assert load_fleet(few, {}).placement.min_load_bound == 4
    assert load_fleet(ARGS, {}).placement.min_load_bound == 16
    assert load_fleet(few | {"router": {"placement": {"min_load_bound": 2}}}, {}).placement.min_load_bound == 2


def test_demand_is_configured_with_the_registry() -> None:
    environ = {"LORAFLEET_REGISTRY__DEMAND__COOL_DOWN_S": "5"}
    assert load_registry({"demand": {"window_s": 3.0}}, environ).demand == DemandConfig(window_s=3.0, cool_down_s=5.0)
    with pytest.raises(ConfigError, match=r"demand\.window_s"):
        load_registry({"demand": {"window_s": 0}}, {})


@pytest.mark.parametrize(
    ("args", "environ", "said"),
    [
        ({"replica": {"model": {"base": "b"}}, "num_replica": 2}, {}, "num_replica"),
        ({"replica": {"model": {"base": "b", "devise": "cpu"}}}, {}, "replica.model.devise"),
        ({"replica": {"model": {"base": "b"}, "adapters": {"max_slots": 0}}}, {}, "replica.adapters.max_slots"),
        (ARGS, {"LORAFLEET_REPLICA__ADAPTERS__MAX_SLOT": "3"}, "replica.adapters.max_slot"),
        (ARGS, {"LORAFLEET_REPLICAS": "2", "LORAFLEET_REPLICAS__COUNT": "2"}, "replicas"),
        (ARGS, {"LORAFLEET_REPLICAS__COUNT": "[2"}, "LORAFLEET_REPLICAS__COUNT"),
        ({}, {}, "replica"),
    ],
)
def test_mistake_is_named(args: dict[str, object], environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_fleet(args, environ)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_mistakes_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_fleet({"replica": {"model": {"base": "b", "x": 1}}, "y": 2}, {})
    assert len(str(caught.value).splitlines()) == 2


def test_logs_and_traces_are_settings_like_any_other() -> None:
    environ = {"LORAFLEET_LOGS__FORMAT": "json", "LORAFLEET_REGISTRY__LOGS__LEVEL": "warning"}
    assert load_fleet(ARGS, environ).logs.format == "json"
    assert load_registry({}, environ).logs.level == "warning"
    assert load_fleet({**ARGS, "traces": {"enabled": True, "sample_ratio": 0.5}}, {}).traces.sample_ratio == 0.5


def test_traces_without_their_extra_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "telemetry.otel", None)
    load_fleet(ARGS, {})
    with pytest.raises(ConfigError, match=r"pip install 'lorafleet\[otel\]'"):
        load_fleet({**ARGS, "traces": {"enabled": True}}, {})
    with pytest.raises(TracesUnavailable):
        open_tracer(TraceConfig(enabled=True), role="gateway", member="m")
