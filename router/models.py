"""The model list: every id that `resolve` accepts by an alias, from the catalog, with where it is resident."""

from collections.abc import Iterator
from typing import Any

from registry.catalog import Catalog
from registry.types import LIVE_ALIAS, AdapterRecord, VersionRecord, VersionState


def list_models(catalog: Catalog, tenant: str) -> list[dict[str, Any]]:
    """The base first, then the adapters that `tenant` may call, in order of name."""
    models = [_base_model(catalog, name) for name in catalog.base_names] if catalog.base is not None else []
    for record in sorted(catalog.adapters_for(tenant), key=lambda record: record.name):
        models += _adapter_models(catalog, record)
    return models


def one_model(catalog: Catalog, tenant: str, model: str) -> dict[str, Any]:
    """The entry of one id, `name@4` too; raises ModelNotFound."""
    resolution = catalog.resolve(tenant, model)
    if resolution.adapter is None:
        return _base_model(catalog, model)
    record = next(record for record in catalog.adapters_for(tenant) if record.name == resolution.adapter)
    version = next(version for version in record.versions if version.number == resolution.number)
    return _adapter_model(catalog, model, record, version)


def _base_model(catalog: Catalog, name: str) -> dict[str, Any]:
    base = catalog.base
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "lorafleet",
        "root": name,
        "parent": None,
        "digest": None if base is None else base.digest,
        "max_model_len": None if base is None else base.context_length,
        "resident_on": [replica.replica_id for replica in catalog.replicas],
    }


def _adapter_models(catalog: Catalog, record: AdapterRecord) -> Iterator[dict[str, Any]]:
    for alias, number in sorted(record.aliases.items(), key=lambda item: (item[0] != LIVE_ALIAS, item[0])):
        version = record.version(number)
        if version is not None and version.state is VersionState.ACTIVE:
            model = record.name if alias == LIVE_ALIAS else f"{record.name}@{alias}"
            yield _adapter_model(catalog, model, record, version)


def _adapter_model(catalog: Catalog, model: str, record: AdapterRecord, version: VersionRecord) -> dict[str, Any]:
    base = catalog.base
    return {
        "id": model,
        "object": "model",
        "created": int(version.created_at_s),
        "owned_by": record.owner,
        "root": f"{record.name}@{version.number}",
        "parent": next(iter(catalog.base_names), None),
        "digest": version.digest,
        "max_model_len": None if base is None else base.context_length,
        "resident_on": [r.replica_id for r in catalog.replicas if version.digest in r.resident],
    }
