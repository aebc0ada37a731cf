"""`serve run` on a Ray of its own that listens on loopback only and has no dashboard: the quickstart's cluster.

It holds HAProxy's port, so that clients wait for the next HAProxy when one dies.

usage: python -m cluster.local_cluster CONFIG.yaml        (as `serve run --app-dir . CONFIG.yaml`)
"""

import os
import sys
from pathlib import Path

import yaml

from cluster.listener import listen_for_proxies

# Read when Ray is imported: a Ray that forms no cluster of several machines takes the loopback address as its own, and
# its servers then listen there alone.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from ray.serve.scripts import cli


def main(config: str) -> None:
    """Start Ray on this machine's loopback address, then hand over to Serve's own command until it is interrupted."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        http = yaml.safe_load(Path(config).read_text()).get("http_options") or {}
        host, port = http.get("host") or "0.0.0.0", http.get("port", 8000)
        try:
            listen_for_proxies(host, port)
        except OSError as error:
            sys.exit(f"{host}:{port}: {error.strerror or error}")
    ray.init(address="local", namespace="serve", include_dashboard=False)
    cli(["run", "--app-dir", ".", config])


if __name__ == "__main__":
    main(*sys.argv[1:])
