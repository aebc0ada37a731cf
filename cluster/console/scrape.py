"""The fleet's `/metrics` as numbers per instance, and what changed between two scrapes. Pure.

The names of the metrics that `lorafleet top` reads stand here and nowhere else.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Figure(NamedTuple):
    """A metric, or the part of it where `label` has this `value`; its other labels are summed."""

    metric: str
    label: str = ""
    value: str = ""


RUNNING = Figure("lorafleet_replica_sequences", "state", "running")
WAITING = Figure("lorafleet_replica_sequences", "state", "waiting")
KV_USED = Figure("lorafleet_replica_kv_blocks", "state", "used")
KV_FREE = Figure("lorafleet_replica_kv_blocks", "state", "free")
SLOTS_IDLE = Figure("lorafleet_adapter_slots", "state", "resident")
SLOTS_PINNED = Figure("lorafleet_adapter_slots", "state", "pinned")
LOADS = Figure("lorafleet_adapter_loads_total")
HITS = Figure("lorafleet_adapter_hits_total", "tier", "slot")
MISSES = Figure("lorafleet_adapter_misses_total", "tier", "slot")
TOKENS = Figure("lorafleet_replica_generation_tokens_total")
REPLICA_FIGURES = (RUNNING, WAITING, KV_USED, KV_FREE, SLOTS_IDLE, SLOTS_PINNED, LOADS, HITS, MISSES, TOKENS)

REQUESTS = "lorafleet_requests_total"
STREAMED_TOKENS = "lorafleet_gateway_completion_tokens_total"
"""Counted as they are sent; a replica counts a request's tokens when it ends."""

INSTANCE_LABEL = "instance"
MODEL_LABEL = "model"


@dataclass(frozen=True)
class Scrape:
    """One reading: each replica's figures by instance, and requests per model over all gateways."""

    at_s: float
    instances: Mapping[str, Mapping[Figure, float]]
    requests: Mapping[str, float]
    num_tokens: float

    def value(self, instance: str, figure: Figure) -> float | None:
        return self.instances.get(instance, {}).get(figure)


def read_scrape(text: str, at_s: float) -> Scrape:
    """Parse Prometheus' text format. Raises ValueError when it is something else."""
    instances: dict[str, dict[Figure, float]] = defaultdict(lambda: defaultdict(float))
    requests: dict[str, float] = defaultdict(float)
    num_tokens = 0.0
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    for name, labels, value, *_ in samples:
        for figure in _figures(name, labels):
            instances[labels.get(INSTANCE_LABEL, "")][figure] += value
        if name == REQUESTS:
            requests[labels.get(MODEL_LABEL, "")] += value
        if name == STREAMED_TOKENS:
            num_tokens += value
    return Scrape(at_s, {name: dict(figures) for name, figures in instances.items()}, dict(requests), num_tokens)


def _figures(name: str, labels: Mapping[str, str]) -> list[Figure]:
    named = (figure for figure in REPLICA_FIGURES if figure.metric == name)
    return [figure for figure in named if not figure.label or labels.get(figure.label) == figure.value]


def growth(before: Scrape, after: Scrape, instance: str, figure: Figure) -> float | None:
    """How much a counter grew; None where it is missing or began anew."""
    old, new = before.value(instance, figure), after.value(instance, figure)
    return None if old is None or new is None or new < old else new - old


def per_second(before: Scrape, after: Scrape, instance: str, figure: Figure) -> float | None:
    grown, span_s = growth(before, after, instance, figure), after.at_s - before.at_s
    return None if grown is None or span_s <= 0 else grown / span_s


def tokens_per_second(before: Scrape, after: Scrape) -> float:
    """Tokens that the gateways sent a second; 0 across a restart."""
    return max(0.0, after.num_tokens - before.num_tokens) / max(after.at_s - before.at_s, 1e-9)


def hit_rate(before: Scrape, after: Scrape, instance: str) -> float | None:
    """Slot hits over acquisitions since `before`, or since the start when there were none."""
    hits, misses = growth(before, after, instance, HITS), growth(before, after, instance, MISSES)
    if not hits and not misses:
        hits, misses = after.value(instance, HITS), after.value(instance, MISSES)
    acquired = (hits or 0.0) + (misses or 0.0)
    return (hits or 0.0) / acquired if acquired else None


def request_rates(before: Scrape, after: Scrape) -> list[tuple[str, float, float]]:
    """Per model its name, requests in all and requests a second, the busiest first."""
    span_s = max(after.at_s - before.at_s, 1e-9)
    rates = [
        (model, total, max(0.0, total - before.requests.get(model, total)) / span_s)
        for model, total in after.requests.items()
    ]
    return sorted(rates, key=lambda rate: (-rate[2], -rate[1], rate[0]))
