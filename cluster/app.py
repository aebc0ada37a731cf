"""Builders of the two Serve applications: `serve run` calls them with the YAML's `args`."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.affinity_router import AffinityRouter
from cluster.config import ActorOptions, FleetConfig, load_fleet, load_registry
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
        **options(config, config.replicas),
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
