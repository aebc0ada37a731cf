"""Checks that what is stored makes sense: what a test asks after every run, and an operator after a restore."""

from collections.abc import Iterator

from sqlalchemy import Connection, func, select

from registry import records, tables
from registry.audit import Head, check_chain, check_head
from registry.blobs import BlobStore
from registry.errors import AuditBroken, RegistryError
from registry.types import ActivationState, AdapterRecord, VersionState

AUDIT_BATCH = 1000


def check(connection: Connection, blobs: BlobStore) -> None:
    """Raise RegistryError naming everything that is wrong."""
    revision = records.revision(connection)
    wrong = [*_log_faults(connection, revision), *_activation_faults(connection), *_blob_faults(connection, blobs)]
    wrong.extend(_audit_faults(connection))
    for adapter in records.adapters_after(connection, 0):
        wrong.extend(_adapter_faults(adapter, revision))
    if wrong:
        raise RegistryError("the registry is damaged: " + "; ".join(wrong))


def _log_faults(connection: Connection, revision: int) -> Iterator[str]:
    logged, last = connection.execute(select(func.count(), func.max(tables.events.c.revision))).one()
    if (logged, last or 0) != (revision, revision):
        yield f"the change log has {logged} entries up to {last}, the counter is at {revision}"


def _audit_faults(connection: Connection) -> Iterator[str]:
    try:
        verify_audit(connection)
    except AuditBroken as error:
        yield error.message


def verify_audit(connection: Connection) -> Head:
    """The head of the audit log, every entry checked. Raises AuditBroken."""
    head = Head()
    while (page := records.audit_page(connection, head.revision, AUDIT_BATCH)).entries:
        head = check_chain(page.entries, head)
    check_head(head, Head(page.head_revision, page.head_hash))
    return head


def _activation_faults(connection: Connection) -> Iterator[str]:
    a = tables.activations.c
    waiting = select(a.name, a.alias).where(a.state == ActivationState.PENDING).group_by(a.name, a.alias)
    for name, alias in connection.execute(waiting.having(func.count() > 1)):
        yield f"{name}@{alias} has several pending activations"


def _blob_faults(connection: Connection, blobs: BlobStore) -> Iterator[str]:
    m, v = tables.manifests.c, tables.versions.c
    needed = select(v.digest).where(v.state != VersionState.COLLECTED)
    query = select(m.digest, m.blob_sha256, m.num_bytes).where(m.digest.in_(needed))
    for digest, sha256, num_bytes in connection.execute(query):
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
        version = adapter.version(number)
        if version is None:
            yield f"{adapter.name}@{alias} points at version {number}, which does not exist"
        elif version.state not in (VersionState.ACTIVE, VersionState.QUARANTINED):
            yield f"{adapter.name}@{alias} points at version {number}, which is {version.state}"
