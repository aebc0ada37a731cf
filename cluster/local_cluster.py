"""`serve run` on a Ray of its own that listens on loopback only and has no dashboard: the quickstart's cluster.

usage: python -m cluster.local_cluster CONFIG.yaml        (as `serve run --app-dir . CONFIG.yaml`)
"""

import os
import sys

# Read when Ray is imported: a Ray that forms no cluster of several machines takes the loopback address as its own, and
# its servers then listen there alone.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from ray.serve.scripts import cli


def main(config: str) -> None:
    """Start Ray on this machine's loopback address, then hand over to Serve's own command until it is interrupted."""
    ray.init(address="local", namespace="serve", include_dashboard=False)
    cli(["run", "--app-dir", ".", config])


if __name__ == "__main__":
    main(*sys.argv[1:])
