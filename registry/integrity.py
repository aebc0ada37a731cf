"""Checks that what is stored makes sense: what a test asks after every run, and an operator after a restore."""

from collections.abc import Iterator

from sqlalchemy import Connection, func, select

from registry import records, tables
from registry.blobs import BlobStore
from registry.errors import RegistryError
from registry.types import ActivationState, AdapterRecord


def check(connection: Connection, blobs: BlobStore) -> None:
    """Raise RegistryError naming everything that is wrong."""
    revision = records.revision(connection)
    wrong = [*_log_faults(connection, revision), *_activation_faults(connection), *_blob_faults(connection, blobs)]
    for adapter in records.adapters_after(connection, 0):
        wrong.extend(_adapter_faults(adapter, revision))
    if wrong:
        raise RegistryError("the registry is damaged: " + "; ".join(wrong))


def _log_faults(connection: Connection, revision: int) -> Iterator[str]:
    logged, last = connection.execute(select(func.count(), func.max(tables.events.c.revision))).one()
    if (logged, last or 0) != (revision, revision):
        yield f"the change log has {logged} entries up to {last}, the counter is at {revision}"


def _activation_faults(connection: Connection) -> Iterator[str]:
    a = tables.activations.c
    waiting = select(a.name, a.alias).where(a.state == ActivationState.PENDING).group_by(a.name, a.alias)
    for name, alias in connection.execute(waiting.having(func.count() > 1)):
        yield f"{name}@{alias} has several pending activations"


def _blob_faults(connection: Connection, blobs: BlobStore) -> Iterator[str]:
    m = tables.manifests.c
    for digest, sha256, num_bytes in connection.execute(select(m.digest, m.blob_sha256, m.num_bytes)):
        if not blobs.exists(sha256):
            yield f"the blob of {digest[:12]} is missing"
        elif blobs.size(sha256) != num_bytes:
            yield f"the blob of {digest[:12]} has {blobs.size(sha256)} bytes instead of {num_bytes}"


def _adapter_faults(adapter: AdapterRecord, revision: int) -> Iterator[str]:
    if adapter.revision > revision:
        yield f"{adapter.name} is at revision {adapter.revision}, the counter at {revision}"
    if [version.number for version in adapter.versions] != list(range(1, len(adapter.versions) + 1)):
        yield f"{adapter.name} has gaps among its version numbers"
    for alias, number in adapter.aliases.items():
        if adapter.version(number) is None:
            yield f"{adapter.name}@{alias} points at version {number}, which does not exist"
