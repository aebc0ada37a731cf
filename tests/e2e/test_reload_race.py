"""Requests by alias while uploads move it, over two replicas whose slots are fewer than the versions."""

from pathlib import Path
from typing import Any

import pytest

from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import local_fleet
from tests.reload_race import Race, make_contents

NUM_CONTENTS, NUM_SLOTS, NUM_CLIENTS = 6, 2, 8


async def race(base: Path, folder: Path, num_requests: int) -> dict[str, Any]:
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=folder / "node", max_slots=NUM_SLOTS),
        scheduler=SchedulerConfig(num_kv_blocks=512),
    )
    contents = make_contents(base, folder, NUM_CONTENTS)
    async with local_fleet(folder, config, num_replicas=2) as fleet, fleet.client() as client:
        figures = await Race(client, contents).run(num_requests, NUM_CLIENTS)
        fleet.check_integrity()
    return figures


def check(figures: dict[str, Any]) -> None:
    assert figures["versions_seen"] == NUM_CONTENTS
    assert figures["while_the_alias_moved"] > 0
    assert figures["text_of_another_version_than_claimed"] == 0
    assert figures["version_that_the_alias_did_not_stand_for"] == 0


@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_no_answer_is_of_a_version_that_the_alias_did_not_stand_for(
    tiny_base: Path, tmp_path: Path, num_requests: int
) -> None:
    check(await race(tiny_base, tmp_path, num_requests))
