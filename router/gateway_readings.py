"""What a gateway knows anyway and tells when it is scraped: loads against bounds, and which digest is which version."""

from collections.abc import Iterable, Iterator

from registry.catalog import Catalog
from registry.types import AdapterRecord, VersionState
from router.meters import Key
from router.placement import Placement
from telemetry import catalogue
from telemetry.catalogue import DIGEST_LABEL_LENGTH
from telemetry.exporter import Reading


class GatewayReadings:
    """Reads the catalog and the placement; names at most `max_adapters` versions."""

    def __init__(self, catalog: Catalog, placement: Placement, max_adapters: int) -> None:
        self._catalog = catalog
        self._placement = placement
        self._max_adapters = max_adapters

    def __call__(self) -> Iterator[Reading]:
        yield Reading(catalogue.GATEWAY_REVISION, self._catalog.revision)
        yield Reading(catalogue.GATEWAY_REPLICAS, len(self._catalog.replicas))
        for replica_id, load, bound in self._placement.loads():
            yield Reading(catalogue.REPLICA_LOAD, load, (replica_id,))
            yield Reading(catalogue.REPLICA_LOAD_BOUND, bound, (replica_id,))
        for label, key in list(names_of_digests(self._catalog.adapters).items())[: self._max_adapters]:
            yield Reading(catalogue.ADAPTER_INFO, 1, (label, *key))


def versions_in_service(adapters: Iterable[AdapterRecord]) -> Iterator[tuple[str, Key]]:
    """Digest, and name and number as labels say them, of every version that is in service."""
    for adapter in adapters:
        for version in adapter.versions:
            if version.state is VersionState.ACTIVE:
                yield version.digest, (adapter.name, str(version.number))


def names_of_digests(adapters: Iterable[AdapterRecord]) -> dict[str, Key]:
    """The label of a digest -> the first of the versions that have it, so that a join finds one."""
    names: dict[str, Key] = {}
    for digest, key in versions_in_service(adapters):
        names.setdefault(digest[:DIGEST_LABEL_LENGTH], key)
    return names
