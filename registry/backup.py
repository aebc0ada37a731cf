"""Backup and restore: a consistent snapshot of the rows, and every blob that they need, in a folder or object store.

Layout of a backup: `blobs/` holds everything under its sha256 (adapters' bytes, and the rows of each table in pieces of
JSON lines); `snapshots/r<revision>.json` names what one snapshot is made of and is written last, so a snapshot that is
there is whole. Several snapshots share their blobs. The rows do not depend on the kind of database.
"""

import hashlib
import json
from collections.abc import Iterator

import fsspec
from pydantic import ValidationError
from sqlalchemy import Connection, func, insert, select

from registry import integrity, records, schema, tables
from registry.audit import Head
from registry.blobs import CHUNK_BYTES, BlobStore
from registry.database import Database
from registry.digest import canonical_json
from registry.errors import BackupFailed, BlobNotFound
from registry.types import Digest, Record

ROWS_A_PIECE = 5000
LEASES = frozenset({tables.replicas.name, tables.gateways.name})
"""Members say themselves that they live; a backup says nothing of it."""


class Snapshot(Record):
    """What one backup is made of."""

    schema_version: str
    revision: int
    audit_hash: Digest
    tables: dict[str, tuple[Digest, ...]]
    """Table -> the blobs with its rows, in order."""
    blobs: dict[Digest, int]
    """sha256 -> number of bytes, of everything that versions and the tokenizer need."""

    @property
    def num_bytes(self) -> int:
        return sum(self.blobs.values())


class BackupStore:
    """A backup's place: a folder or what fsspec understands (`s3://bucket/prefix`)."""

    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._folder = f"{str(root).rstrip('/')}/snapshots"
        self.blobs = BlobStore(f"{url.rstrip('/')}/blobs")

    def names(self) -> list[str]:
        """The snapshots there are, the oldest first."""
        self._fs.invalidate_cache()
        found = (str(path).rpartition("/")[2] for path in self._fs.glob(f"{self._folder}/r*.json"))
        return sorted(name.removesuffix(".json") for name in found)

    def write(self, snapshot: Snapshot) -> str:
        name = f"r{snapshot.revision:012d}"
        self._fs.makedirs(self._folder, exist_ok=True)
        self._fs.pipe_file(f"{self._folder}/{name}.json", snapshot.model_dump_json(indent=1).encode())
        return name

    def read(self, name: str | None) -> Snapshot:
        """The named snapshot, or the newest. Raises BackupFailed."""
        names = self.names()
        chosen = name or (names[-1] if names else None)
        if chosen not in names:
            listed = ", ".join(names) or "none"
            raise BackupFailed(f"there is no snapshot {chosen or ''} in {self._folder}; there are: {listed}")
        try:
            return Snapshot.model_validate_json(self._fs.cat_file(f"{self._folder}/{chosen}.json"))
        except ValidationError as error:
            raise BackupFailed(f"snapshot {chosen} is damaged: {error.errors()[0]['msg']}") from error


def backup(database: Database, blobs: BlobStore, to: BackupStore) -> tuple[str, Snapshot]:
    """Copy everything there is at this moment; the registry may run on. Returns the snapshot's name and contents.

    Raises BackupFailed when a blob is missing or does not match its digest.
    """
    with database.read() as connection:
        revision = records.revision(connection)
        head = integrity.verify_audit(connection)
        pieces = {
            table.name: tuple(to.blobs.put_bytes(piece) for piece in _dump(connection, table.name))
            for table in tables.metadata.sorted_tables
            if table.name not in LEASES
        }
        needed = records.needed_blobs(connection)
        base = records.base_spec(connection)
    if base is not None and blobs.exists(base.tokenizer_sha256):
        needed |= {base.tokenizer_sha256}
    sizes = {sha256: _copy(blobs, to.blobs, sha256) for sha256 in sorted(needed)}
    snapshot = Snapshot(schema_version=schema.HEAD, revision=revision, audit_hash=head.hash, tables=pieces, blobs=sizes)
    return to.write(snapshot), snapshot


def restore(database: Database, blobs: BlobStore, source: BackupStore, name: str | None = None) -> Snapshot:
    """Fill an empty registry from a snapshot (the newest, or the named one); every byte is checked.

    Raises BackupFailed, and leaves the database empty, when the registry is not empty or the backup is not whole.
    """
    snapshot = source.read(name)
    if snapshot.schema_version != schema.HEAD:
        raise BackupFailed(
            f"the snapshot has schema {snapshot.schema_version}, this program {schema.HEAD}: restore it with the"
            " release that wrote it, and let this one upgrade the database"
        )
    with database.read() as connection:
        _refuse_unless_empty(connection)
    for sha256, num_bytes in snapshot.blobs.items():
        if _copy(source.blobs, blobs, sha256) != num_bytes:
            raise BackupFailed(f"blob {sha256[:12]} of the backup does not have {num_bytes} bytes")
    with database.write() as tx:
        _refuse_unless_empty(tx.connection)
        tx.connection.execute(tables.meta.delete())
        for table in tables.metadata.sorted_tables:
            for piece in snapshot.tables.get(table.name, ()):
                rows = [json.loads(line) for line in _read(source.blobs, piece).splitlines()]
                tx.connection.execute(insert(table), rows)
        _set_counters(tx.connection)
        if integrity.verify_audit(tx.connection) != Head(snapshot.revision, snapshot.audit_hash):
            raise BackupFailed("the restored change log is not the one that was backed up")
        integrity.check(tx.connection, blobs)
    return snapshot


def _dump(connection: Connection, name: str) -> Iterator[bytes]:
    """The table's rows as JSON lines, in pieces, ordered by primary key so that equal rows give equal pieces."""
    table = tables.metadata.tables[name]
    rows = connection.execute(select(table).order_by(*table.primary_key.columns)).mappings()
    while part := rows.fetchmany(ROWS_A_PIECE):
        yield b"\n".join(canonical_json(dict(row)) for row in part)


def _copy(source: BlobStore, target: BlobStore, sha256: str) -> int:
    """Copy one blob, checked; one that is there already is read and checked too. Returns its number of bytes."""
    if not target.exists(sha256):
        try:
            target.put_stream(_pieces(source, sha256), sha256)
        except ValueError as error:
            raise BackupFailed(str(error)) from error
    digest, num_bytes = hashlib.sha256(), 0
    for piece in _pieces(target, sha256):
        digest.update(piece)
        num_bytes += len(piece)
    if digest.hexdigest() != sha256:
        target.delete(sha256)
        raise BackupFailed(f"blob {sha256[:12]} does not match its digest")
    return num_bytes


def _pieces(blobs: BlobStore, sha256: str) -> Iterator[bytes]:
    try:
        size = blobs.size(sha256)
    except BlobNotFound as error:
        raise BackupFailed(f"blob {sha256[:12]} is missing") from error
    for offset in range(0, size, CHUNK_BYTES):
        yield blobs.read(sha256, offset, CHUNK_BYTES)


def _read(blobs: BlobStore, sha256: str) -> bytes:
    data = b"".join(_pieces(blobs, sha256))
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BackupFailed(f"rows {sha256[:12]} of the backup do not match their digest")
    return data


def _refuse_unless_empty(connection: Connection) -> None:
    if records.revision(connection) or connection.execute(select(func.count()).select_from(tables.events)).scalar_one():
        raise BackupFailed("the registry is not empty; restore into a new database and a new blob store")


def _set_counters(connection: Connection) -> None:
    """PostgreSQL counts activations in a sequence of its own, which rows with given ids do not move."""
    if connection.dialect.name == "postgresql":
        last = select(func.coalesce(func.max(tables.activations.c.activation_id), 0)).scalar_subquery()
        sequence = func.pg_get_serial_sequence("activations", "activation_id")
        connection.execute(select(func.setval(sequence, last + 1, False)))
