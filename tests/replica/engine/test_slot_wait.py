"""An adapter that waits for a slot while the resident ones are in constant use: served within a bound (E01, E03)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replica.adapters.cache import AdapterCache, Workers
from replica.adapters.node_store import NodeStore
from replica.config import MIB, AdapterCacheConfig, SchedulerConfig
from replica.engine import Engine
from replica.metrics import ReplicaMetrics
from tests.fakes import CollectingOutbox, FakeModel
from tests.replica.adapters.by_hand import Tasks
from tests.replica.adapters.made import SITES, DictSource, make_adapter
from tests.replica.engine.harness import make_request

STEP_S = 0.1
DRAIN_AFTER_S = 1.0
MAX_TOKENS = 10
ADAPTERS = [make_adapter(seed, rank=rank) for seed, rank in ((1, 8), (2, 8), (3, 8), (4, 16))]


class Clocked:
    """An engine over the real adapter tiers whose loads and clock move by hand, a step at a time."""

    def __init__(self, folder: Path, policy: str) -> None:
        store = NodeStore(folder, DictSource(*ADAPTERS), MIB)
        for made in ADAPTERS:
            store.stage(made.manifest)
        self.now_s = 0.0
        self.tasks: list[Callable[[], None]] = []
        workers = Workers(Tasks(self.tasks), Tasks(self.tasks), Tasks(self.tasks))
        limits = AdapterCacheConfig(max_slots=2, drain_after_s=DRAIN_AFTER_S)
        self.cache = AdapterCache.build(
            limits, store, SITES, torch.device("cpu"), torch.float32, clock=lambda: self.now_s, workers=workers
        )
        self.outbox = CollectingOutbox()
        config = SchedulerConfig(policy=policy, block_size=4, max_num_seqs=8)  # type: ignore[arg-type]
        self.engine = Engine(
            FakeModel(), self.cache, config, ReplicaMetrics(), num_blocks=400, num_slots=2, clock=lambda: self.now_s
        )
        self.num_sent = 0

    def step(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()
        self.engine._step()
        self.now_s += STEP_S

    def send(self, which: int, name: str = "") -> None:
        self.num_sent += 1
        request = make_request(
            name or f"r{self.num_sent}", [1, 2], MAX_TOKENS, adapter=ADAPTERS[which].digest, tenant=f"t{which}"
        )
        self.engine.submit(request, self.outbox)

    def saturate(self) -> None:
        """Keep both resident adapters in use, with more of each waiting."""
        for which in (0, 1):
            waiting = [group for group in self.engine._live.all() if group.adapter == ADAPTERS[which].digest]
            for _ in range(6 - len(waiting)):
                self.send(which)


@pytest.mark.parametrize("policy", ["drr", "fcfs"])
@pytest.mark.parametrize("which", [2, 3])
def test_an_adapter_gets_a_slot_within_a_bound_although_two_are_saturated(
    tmp_path: Path, policy: str, which: int
) -> None:
    bench = Clocked(tmp_path, policy)
    for _ in range(30):
        bench.saturate()
        bench.step()
    bench.send(which, "late")
    sent_s = bench.now_s
    while not bench.outbox.tokens["late", 0]:
        bench.saturate()
        bench.step()
        assert bench.now_s - sent_s < 60, bench.engine
    queue_s = 12 * MAX_TOKENS / 8 * STEP_S  # those that wait ahead of it, in arrival order
    bound_s = DRAIN_AFTER_S + MAX_TOKENS * STEP_S + 5 * STEP_S + (queue_s if policy == "fcfs" else 0)
    assert bench.now_s - sent_s <= bound_s
    assert len(bench.cache.stats().resident) <= 2
    while bench.engine._live.all():
        bench.step()
    bench.engine.check_integrity(bench.cache.check_integrity)
    bench.cache.close()
