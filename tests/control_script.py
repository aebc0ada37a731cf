"""Run by tests in a process of its own: takes the registry application of a running fleet away, brings it back, or
gives the fleet another configuration, as `serve deploy` does where there is a dashboard.

usage: control_script.py delete | run DATA_DIR LEASE_TTL_S | deploy CONFIG.yaml      (RAY_ADDRESS names the fleet)
"""

import sys
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.app import build_registry


def main(action: str, *arguments: str) -> None:
    ray.init(log_to_driver=False, namespace="serve")
    if action == "delete":
        serve.delete("registry")
    elif action == "deploy":
        config = ServeDeploySchema.model_validate(yaml.safe_load(Path(arguments[0]).read_text()))
        _get_global_client().deploy_apps(config, _blocking=False)
    else:
        data_dir, lease_ttl_s = arguments
        serve.run(
            build_registry({"data_dir": data_dir, "lease_ttl_s": float(lease_ttl_s)}),
            name="registry",
            route_prefix=None,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
