"""Thirty deaths under load: nothing that was acknowledged is lost, nothing half-made shows, every answer is right."""

from pathlib import Path

import pytest

from tests.faults.kills import run
from tests.fleet_process import REGISTRY, REPLICA

pytestmark = [pytest.mark.serve, pytest.mark.soak, pytest.mark.timeout(3000)]


def test_thirty_kills_under_load_lose_nothing_and_answer_right(tiny_base: Path, tmp_path: Path) -> None:
    figures = run(tiny_base, tmp_path, (REGISTRY,) * 20 + (REPLICA,) * 10)
    print(figures)
    assert {"push", "activate"} <= figures["amid"].keys()
    assert figures["answers"]["right"] > 1000
