"""The registry's figures in Prometheus' text. They are the database's: a registry that restarts goes on with them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from registry.figures import Propagation, RegistryFigures
from registry.types import UNDER_WAY, ActivationState
from telemetry import catalogue
from telemetry.exporter import Exporter, Reading

ENDED = (ActivationState.DONE, ActivationState.FAILED, ActivationState.SUPERSEDED)


class RegistryMetrics:
    """`read` gives the figures, with propagation times counted by the bounds it is asked for."""

    def __init__(self, read: Callable[[Sequence[float]], RegistryFigures]) -> None:
        self._read = read

    def render(self) -> bytes:
        """One reading of the database as text; blocks. Raises what `read` does. Any thread may call it."""
        figures = self._read(catalogue.PROPAGATION_S.buckets)
        exporter = Exporter(catalogue.REGISTRY)
        propagation = exporter.histogram(catalogue.PROPAGATION_S).labels()
        propagation.counts, propagation.total = spread(figures.propagation)
        exporter.watch(lambda: readings(figures))
        return exporter.render()


def readings(figures: RegistryFigures) -> Iterator[Reading]:
    """All but the propagation times."""
    yield Reading(catalogue.REGISTRY_REVISION, figures.revision)
    for replica_id, lag in figures.replica_lags.items():
        yield Reading(catalogue.REPLICA_LAG, lag, (replica_id,))
    for replica_id, lag_s in figures.replica_lags_s.items():
        yield Reading(catalogue.REPLICA_LAG_S, lag_s, (replica_id,))
    for gateway_id, lag in figures.gateway_lags.items():
        yield Reading(catalogue.GATEWAY_LAG, lag, (gateway_id,))
    yield Reading(catalogue.REGISTRY_REPLICAS, len(figures.replica_lags) - figures.num_drained, ("ready",))
    yield Reading(catalogue.REGISTRY_REPLICAS, figures.num_drained, ("drained",))
    for version_state, count in figures.versions.items():
        yield Reading(catalogue.VERSIONS, count, (version_state,))
    for state in ENDED:
        yield Reading(catalogue.ACTIVATIONS, figures.activations[state], (state,))
    for state in UNDER_WAY:
        yield Reading(catalogue.ACTIVATIONS_OPEN, figures.activations[state], (state,))
    yield Reading(catalogue.OLDEST_OPEN, figures.oldest_open_s)


def spread(propagation: Propagation) -> tuple[list[int], float]:
    """Counts bucket by bucket, the last one without bound, and the sum."""
    sums = (0, *propagation.num_within, propagation.count)
    return [after - before for before, after in pairwise(sums)], propagation.sum_s
