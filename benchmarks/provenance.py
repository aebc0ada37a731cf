"""Where a figure comes from: machine, versions and commit, written beside the results."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "ray")


def save(name: str, question: str, conditions: Mapping[str, Any], results: Any) -> Path:
    """Write `benchmarks/results/<name>.json` and return its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"question": question, "conditions": dict(conditions), **provenance(), "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def provenance() -> dict[str, Any]:
    return {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "commit": commit(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """The commit of this folder; LORAFLEET_COMMIT names it for a copy that has no history."""
    if named := os.environ.get("LORAFLEET_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
