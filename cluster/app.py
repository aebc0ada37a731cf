"""Builders of the two Serve applications: `serve run` calls them with the YAML's `args`."""

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.affinity_router import AffinityRouter
from cluster.autoscaling import SwapAwarePolicy, Targets
from cluster.config import ActorOptions, FleetConfig, ScalingConfig, load_fleet, load_registry
from cluster.gateway_deployment import GatewayDeployment
from cluster.registry_actor import RegistryActor
from cluster.replica_deployment import ReplicaDeployment, ReplicaFactory, torch_replica
from registry.config import RegistryConfig

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
HEAD_NODE = "node:__internal_head__"


def build_registry(args: dict[str, Any]) -> Application:
    """The registry application: one actor that outlives every redeploy of the fleet."""
    config = load_registry(args)
    deployment = serve.deployment(
        name="RegistryActor",
        num_replicas=1,
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=10,
        ray_actor_options={"num_cpus": 0, **place(config)},
        health_check_period_s=HEALTH_PERIOD_S,
    )(RegistryActor)
    return deployment.bind(config)


def place(config: RegistryConfig) -> dict[str, Any]:
    """SQLite's file and a blob folder are on one node, so an actor that uses them stays on the head node."""
    is_local = config.database.startswith("sqlite") or "://" not in config.blobs
    return {"resources": {HEAD_NODE: 0.001}} if is_local else {}


def build_fleet(args: dict[str, Any]) -> Application:
    """The fleet application: gateways in front of replicas."""
    return fleet(load_fleet(args))


def fleet(config: FleetConfig, replica_factory: ReplicaFactory = torch_replica) -> Application:
    """As `build_fleet`, with another engine behind the same protocol when `replica_factory` is given."""
    replicas = serve.deployment(
        name="Replica",
        request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        **scaled(options(config, config.replicas), config.scaling),
    )(ReplicaDeployment)
    gateways = serve.deployment(
        name="Gateway",
        health_check_period_s=HEALTH_PERIOD_S,
        **options(config, config.gateways),
    )(serve.ingress()(GatewayDeployment))
    base_names = (config.replica.model.base_name,)
    return gateways.bind(config, base_names, replicas.bind(config, replica_factory))


def options(config: FleetConfig, actors: ActorOptions) -> dict[str, Any]:
    """What a deployment asks of Serve and Ray."""
    return {
        "num_replicas": actors.count,
        "max_ongoing_requests": config.max_ongoing_requests,
        "graceful_shutdown_timeout_s": config.drain_timeout_s,
        "ray_actor_options": {"num_cpus": actors.num_cpus, "num_gpus": actors.num_gpus},
    }


def scaled(options: dict[str, Any], scaling: ScalingConfig) -> dict[str, Any]:
    """The options with Serve's autoscaling in place of the fixed number, where `max_replicas` asks for it."""
    if scaling.max_replicas is None:
        return options
    count = min(max(options.pop("num_replicas"), scaling.min_replicas), scaling.max_replicas)
    return {**options, "autoscaling_config": autoscaling(scaling, scaling.max_replicas, count)}


def autoscaling(scaling: ScalingConfig, max_replicas: int, initial_replicas: int) -> AutoscalingConfig:
    """Serve's bounds and delays around the fleet's own decision."""
    targets = Targets(
        requests=scaling.target_requests,
        swaps_per_s=scaling.target_swaps_per_s,
        settle_s=scaling.settle_s,
        remember_s=scaling.remember_s,
    )
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=max_replicas,
        initial_replicas=initial_replicas,
        look_back_period_s=scaling.look_back_s,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=SwapAwarePolicy, policy_kwargs=asdict(targets)),
    )
