"""The metrics that `lorafleet top` reads are the ones that replicas and gateways export."""

import pytest
import torch

from cluster.console import scrape
from cluster.console.scrape import Scrape, read_scrape
from registry.catalog import Resolution
from replica.adapters.stats import CacheStats
from replica.engine import EngineCounts
from replica.messages import GenerateRequest, SamplingParams
from replica.metrics import ReplicaMetrics
from replica.model.batch import ForwardBatch
from replica.readings import EngineReadings, TierReadings
from replica.sequence import RequestGroup
from router.exposition import merge_expositions
from router.metrics import GatewayMetrics
from tests.fakes import CollectingOutbox

COUNTS = EngineCounts(num_waiting=1, num_loading=2, num_running=3, num_free_blocks=75)
STATS = CacheStats(
    num_slots=4,
    slots_by_state={"free": 1, "loading": 0, "resident": 2, "pinned": 1},
    resident=(),
    host_cached=(),
    host_bytes=0,
    host_free_bytes=0,
    arena_bytes=1,
    arena_free_bytes=1,
    num_waiting=0,
    num_hits=7,
    num_misses=3,
    num_failures=0,
    loads={"host": 1, "node": 2, "blob": 0},
    evictions={("slot", "room"): 1},
    load_seconds={},
)


@pytest.fixture
def reading() -> Scrape:
    """One scrape of a fleet with one gateway, which has served one call, and one replica."""
    replica, gateway = ReplicaMetrics(), GatewayMetrics()
    replica.watch(EngineReadings(lambda: COUNTS, 100))
    replica.watch(TierReadings(lambda: STATS))
    request = GenerateRequest("r", "acme", None, (1,), SamplingParams(1, n=11))
    sequences = RequestGroup(request, CollectingOutbox()).sequences
    replica.on_step(ForwardBatch(torch.zeros(11), torch.zeros(11), (), torch.zeros(11)), 0.1, sequences)
    with gateway.meter(Resolution(model="legal", adapter="legal", number=1), "acme", 5) as meter:
        meter.prompt_meter()(9, 1)
    text = merge_expositions({"gateway": gateway.exposition(), "replica-0": replica.render()})
    return read_scrape(text.decode(), 0.0)


def test_every_figure_of_a_replica_is_exported(reading: Scrape) -> None:
    assert reading.instances == {
        "replica-0": {
            scrape.RUNNING: 3,
            scrape.WAITING: 1,
            scrape.KV_USED: 25,
            scrape.KV_FREE: 75,
            scrape.SLOTS_IDLE: 2,
            scrape.SLOTS_PINNED: 1,
            scrape.LOADS: 3,
            scrape.HITS: 7,
            scrape.MISSES: 3,
            scrape.TOKENS: 11,
        }
    }


def test_requests_and_tokens_of_a_gateway_are_exported(reading: Scrape) -> None:
    assert reading.requests == {"legal": 1}
    assert reading.num_tokens == 9
