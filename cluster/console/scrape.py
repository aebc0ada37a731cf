"""The fleet's `/metrics` as numbers per instance, and what changed between two scrapes. Pure.

The names of the metrics that `lorafleet top` reads stand here and nowhere else.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "lorafleet_requests_running"
WAITING = "lorafleet_requests_waiting"
KV_USED = "lorafleet_kv_blocks_used"
KV_TOTAL = "lorafleet_kv_blocks_total"
LOADS = "lorafleet_adapter_loads_total"
HITS = "lorafleet_slot_hits_total"
MISSES = "lorafleet_slot_misses_total"
TOKENS = "lorafleet_generated_tokens_total"
REQUESTS = "lorafleet_gateway_requests_total"

INSTANCE_LABEL = "instance"
MODEL_LABEL = "model"
PER_INSTANCE = frozenset({RUNNING, WAITING, KV_USED, KV_TOTAL, LOADS, HITS, MISSES, TOKENS})


@dataclass(frozen=True)
class Scrape:
    """One reading: per instance the sum of each metric over its other labels, and requests per model."""

    at_s: float
    instances: Mapping[str, Mapping[str, float]]
    requests: Mapping[str, float]

    def value(self, instance: str, metric: str) -> float | None:
        return self.instances.get(instance, {}).get(metric)


def read_scrape(text: str, at_s: float) -> Scrape:
    """Parse Prometheus' text format. Raises ValueError when it is something else."""
    instances: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    requests: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in PER_INSTANCE:
                instances[sample.labels.get(INSTANCE_LABEL, "")][sample.name] += sample.value
            elif sample.name == REQUESTS:
                requests[sample.labels.get(MODEL_LABEL, "")] += sample.value
    return Scrape(at_s, {name: dict(values) for name, values in instances.items()}, dict(requests))


def growth(before: Scrape, after: Scrape, instance: str, metric: str) -> float | None:
    """How much a counter grew; None where it is missing or began anew."""
    old, new = before.value(instance, metric), after.value(instance, metric)
    return None if old is None or new is None or new < old else new - old


def per_second(before: Scrape, after: Scrape, instance: str, metric: str) -> float | None:
    grown, span_s = growth(before, after, instance, metric), after.at_s - before.at_s
    return None if grown is None or span_s <= 0 else grown / span_s


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
