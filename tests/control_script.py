"""Run by tests in a process of its own: takes the registry application of a running fleet away, or brings it back.

usage: control_script.py delete | run DATA_DIR LEASE_TTL_S      (RAY_ADDRESS names the fleet)
"""

import sys

import ray
from ray import serve

from cluster.app import build_registry


def main(action: str, *arguments: str) -> None:
    ray.init(log_to_driver=False)
    if action == "delete":
        serve.delete("registry")
    else:
        data_dir, lease_ttl_s = arguments
        serve.run(
            build_registry({"data_dir": data_dir, "lease_ttl_s": float(lease_ttl_s)}),
            name="registry",
            route_prefix=None,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
