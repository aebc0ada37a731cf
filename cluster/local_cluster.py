"""`serve run` on a Ray of its own that listens on loopback only and has no dashboard: the quickstart's cluster.

usage: python -m cluster.local_cluster CONFIG.yaml        (as `serve run --app-dir . CONFIG.yaml`)
"""

import sys

import ray
from ray._common.network_utils import get_localhost_ip
from ray.serve.scripts import cli


def main(config: str) -> None:
    """Start Ray on this machine's loopback address, then hand over to Serve's own command until it is interrupted."""
    ray.init(address="local", namespace="serve", include_dashboard=False, _node_ip_address=get_localhost_ip())
    cli(["run", "--app-dir", ".", config])


if __name__ == "__main__":
    main(*sys.argv[1:])
