"""The registry's own metrics, which every gateway asks for when it is scraped."""

import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from cluster.registry_metrics import RegistryMetrics
from registry.figures import Propagation, RegistryFigures
from registry.types import ActivationState
from tests.metrics_text import samples_of


def figures(number: int, bounds_s: Sequence[float]) -> RegistryFigures:
    """Figures that all say `number`."""
    return RegistryFigures(
        revision=number,
        replica_lags={},
        replica_lags_s={},
        gateway_lags={},
        num_drained=0,
        versions={},
        activations=dict.fromkeys(ActivationState, number),
        oldest_open_s=float(number),
        propagation=Propagation(num_within=(0,) * len(bounds_s), count=number, sum_s=float(number)),
    )


@pytest.fixture
def many_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("many_switches")
def test_scrapes_at_the_same_time_show_one_moment_each() -> None:
    revisions = count(1)
    metrics = RegistryMetrics(lambda bounds_s: figures(next(revisions), bounds_s))
    texts: list[bytes] = []

    def scrape() -> None:
        texts.extend(metrics.render() for _ in range(200))

    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moments = [{value for value in samples_of(text).values() if value} for text in texts]
    assert all(len(numbers) == 1 for numbers in moments)
    assert set().union(*moments) == set(range(1, 801))
