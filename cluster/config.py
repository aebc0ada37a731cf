"""Configuration of a fleet: strict models, the same in a Serve YAML's `args`, in the environment and in code.

The fleet application takes a FleetConfig, the registry application a RegistryConfig, so that a change to the fleet
leaves the registry running. Environment variables start with `LORAFLEET_`, nest with two underscores
(`LORAFLEET_REPLICA__ADAPTERS__MAX_SLOTS=12`) and win over the YAML file. A misspelt key or variable is an error,
because Serve itself ignores what it does not know.
"""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from registry.config import RegistryConfig
from replica.config import ReplicaConfig
from router.config import PlacementConfig, RouterConfig
from telemetry.logs import LogConfig
from telemetry.traces import TraceConfig, TracesUnavailable, check_available

ENV_PREFIX = "LORAFLEET_"
REGISTRY_SECTION = "registry"
CLIENT_VARIABLES = frozenset({"LORAFLEET_URL", "LORAFLEET_API_KEY", "LORAFLEET_BASE"})
"""Variables of the command line and of the tests, which are no configuration of the fleet."""


class ConfigError(ValueError):
    """The configuration is wrong; the message names field, value and what is allowed."""


class ActorOptions(BaseModel):
    """What one deployment's replicas ask of Ray."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)


class ScalingConfig(BaseModel):
    """When the number of replicas follows the load, and how; see `cluster.autoscaling`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_replicas: int | None = Field(default=None, ge=1)
    """None: `replicas.count` replicas, whatever the load."""
    min_replicas: int = Field(default=1, ge=1)
    target_requests: float = Field(default=32.0, gt=0)
    """Requests that one replica should have running and waiting."""
    target_swaps_per_s: float = Field(default=1.0, gt=0)
    """Adapters a second that one replica may evict before the fleet counts as too small for its working set."""
    settle_s: float = Field(default=60.0, ge=0)
    remember_s: float = Field(default=1800.0, ge=0)
    look_back_s: float = Field(default=30.0, gt=10)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)

    @model_validator(mode="after")
    def _check_range(self) -> "ScalingConfig":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, above max_replicas, {self.max_replicas}")
        return self


class FleetConfig(BaseModel):
    """Everything the replicas and gateways of a fleet need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replica: ReplicaConfig
    router: RouterConfig = Field(default_factory=RouterConfig)
    replicas: ActorOptions = ActorOptions(count=2)
    gateways: ActorOptions = ActorOptions(count=1)
    scaling: ScalingConfig = ScalingConfig()
    registry_app: str = "registry"
    """Name of the Serve application that runs the registry actor."""
    max_ongoing_requests: int = Field(default=4096, ge=1)
    """What Serve lets through to one replica; the engine admits for itself."""
    drain_timeout_s: float = Field(default=600.0, gt=0)
    watch_timeout_s: float = Field(default=2.0, gt=0, le=5)
    coalesce_s: float = Field(default=0.04, ge=0, le=0.5)
    """Tokens of running streams cross to the gateway at most this often; first tokens and ends go at once."""
    channel_linger_s: float = Field(default=2.0, gt=0)
    """How long a gateway's token channel stays open with nothing in flight; a drain waits that long."""
    logs: LogConfig = LogConfig()
    traces: TraceConfig = TraceConfig()

    @property
    def placement(self) -> PlacementConfig:
        """`router.placement`, for replicas with as many rows as these have."""
        return self.router.placement.for_rows(self.replica.scheduler.max_num_seqs)


Model = TypeVar("Model", bound=BaseModel)


def load_fleet(args: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> FleetConfig:
    """The fleet's configuration from YAML `args` and the environment. Raises ConfigError, one line per mistake."""
    overrides = environment_overrides(os.environ if environ is None else environ)
    overrides.pop(REGISTRY_SECTION, None)
    config = validate(FleetConfig, merge(dict(args), overrides))
    try:
        check_available(config.traces)
    except TracesUnavailable as error:
        raise ConfigError(str(error)) from error
    return config


def load_registry(args: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> RegistryConfig:
    """The registry's configuration; its variables begin with `LORAFLEET_REGISTRY__`. Raises ConfigError."""
    overrides = environment_overrides(os.environ if environ is None else environ)
    return validate(RegistryConfig, merge(dict(args), overrides.get(REGISTRY_SECTION, {})))


def validate(model: type[Model], values: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def environment_overrides(environ: Mapping[str, str]) -> dict[str, Any]:
    """The nested settings that `LORAFLEET_*` variables spell; values are YAML. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if variable.startswith(ENV_PREFIX) and variable not in CLIENT_VARIABLES:
            _set(overrides, variable, text)
    return overrides


def _set(overrides: dict[str, Any], variable: str, text: str) -> None:
    *parents, leaf = variable.removeprefix(ENV_PREFIX).lower().split("__")
    node = overrides
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{variable}: another variable sets {parent!r} as a whole; set one or the other")
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{variable}: {text!r} is no YAML value; quote it") from None


def merge(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the leaves of `over` laid on top."""
    for key, value in over.items():
        below = under.get(key)
        under[key] = merge(dict(below), value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return under


def describe(error: ValidationError) -> str:
    """One line per mistake: where, what was given, and what is wrong with it."""
    lines = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        lines.append(f"{place}: {fault['msg']} (got {fault['input']!r})")
    return "\n".join(lines)
