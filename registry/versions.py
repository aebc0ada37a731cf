"""Writes base, adapters and versions. Every function runs inside the caller's transaction."""

from sqlalchemy import delete, func, insert, select, update

from registry import activations, records, tables
from registry.database import Transaction
from registry.errors import AdapterNotFound, Conflict
from registry.types import AdapterManifest, BaseSpec, VersionState


def publish_base(tx: Transaction, spec: BaseSpec, *, actor: str) -> int:
    """Record what the replicas hold; returns the revision at which it last changed. Raises Conflict."""
    row = tx.connection.execute(select(tables.base)).one_or_none()
    if row is not None and records.base_spec(tx.connection) == spec:
        return int(row.revision)
    if row is not None and row.digest != spec.digest:
        _refuse_base_in_use(tx, row.digest)
    revision = tx.record("base_published", actor=actor, digest=spec.digest, base_id=spec.base_id)
    values = {"digest": spec.digest, "spec": spec.model_dump_json(), "revision": revision}
    tx.connection.execute(update(tables.base).values(values) if row else insert(tables.base).values(id=1, **values))
    return revision


def _refuse_base_in_use(tx: Transaction, digest: str) -> None:
    in_use = select(func.count()).select_from(tables.versions).where(tables.versions.c.state != VersionState.RETIRED)
    if tx.connection.execute(in_use).scalar_one():
        raise Conflict(f"versions exist for the base {digest[:12]}; retire them before publishing another base")
    if tx.connection.execute(select(func.count()).select_from(tables.replicas)).scalar_one():
        raise Conflict(f"replicas are serving the base {digest[:12]}; stop them before publishing another base")


def check_owner(tx_owner: str | None, name: str, owner: str) -> None:
    """Raises Conflict when the name belongs to somebody else."""
    if tx_owner is not None and tx_owner != owner:
        raise Conflict(f"the name {name!r} is taken by another owner")


def add_version(
    tx: Transaction, name: str, manifest: AdapterManifest, *, owner: str, keep_manifest: bool
) -> tuple[int, bool]:
    """The number of the version of `name` with this content, and whether it is new. Raises Conflict.

    `keep_manifest` says that a manifest stored earlier under this digest still has its blob.
    """
    _ensure_adapter(tx, name, owner)
    _ensure_manifest(tx, manifest, keep_manifest)
    v = tables.versions.c
    known = tx.connection.execute(
        select(v.number, v.state).where(v.name == name, v.digest == manifest.digest)
    ).one_or_none()
    if known is not None:
        _restore(tx, name, known.number, VersionState(known.state), owner)
        return known.number, False
    last = tx.connection.execute(select(func.max(v.number)).where(v.name == name)).scalar_one() or 0
    tx.connection.execute(
        insert(tables.versions).values(
            name=name, number=last + 1, digest=manifest.digest, state=VersionState.ACTIVE, created_at_s=tx.now_s
        )
    )
    tx.record("version_pushed", actor=owner, name=name, number=last + 1, digest=manifest.digest)
    return last + 1, True


def _ensure_adapter(tx: Transaction, name: str, owner: str) -> None:
    where = tables.adapters.c.name == name
    found = tx.connection.execute(select(tables.adapters.c.owner).where(where)).scalar_one_or_none()
    check_owner(found, name, owner)
    if found is None:
        tx.connection.execute(
            insert(tables.adapters).values(
                name=name, owner=owner, callers=["*"], revision=tx.revision, created_at_s=tx.now_s
            )
        )


def _ensure_manifest(tx: Transaction, manifest: AdapterManifest, keep: bool) -> None:
    values = {
        "manifest": manifest.model_dump_json(),
        "blob_sha256": manifest.blob_sha256,
        "num_bytes": manifest.blob_bytes,
        "max_rank": manifest.max_rank,
        "target_names": list(manifest.target_names),
    }
    if records.manifest(tx.connection, manifest.digest) is None:
        tx.connection.execute(insert(tables.manifests).values(digest=manifest.digest, **values))
    elif not keep:
        where = tables.manifests.c.digest == manifest.digest
        tx.connection.execute(update(tables.manifests).where(where).values(values))


def _restore(tx: Transaction, name: str, number: int, state: VersionState, actor: str) -> None:
    """Pushing a retired version again brings it back; a quarantined one stays out."""
    if state is VersionState.QUARANTINED:
        raise Conflict(f"this content is version {number} of {name!r}, which is quarantined")
    if state is VersionState.RETIRED:
        _set_state(tx, name, number, VersionState.ACTIVE)
        tx.record("version_restored", actor=actor, name=name, number=number)


def retire_version(tx: Transaction, name: str, number: int, *, actor: str) -> None:
    """Raises AdapterNotFound, and Conflict while an alias points at the version."""
    record = records.adapter(tx.connection, name)
    _require(record.version(number) is not None, name, number)
    pointing = sorted(alias for alias, target in record.aliases.items() if target == number)
    if pointing:
        raise Conflict(f"{name}@{number} is the target of {', '.join(pointing)}; move or remove the alias first")
    _close(tx, name, number, VersionState.RETIRED, "version_retired", actor)


def retire_adapter(tx: Transaction, name: str, *, actor: str) -> None:
    """Retire every version and remove every alias; does nothing when that is so already. Raises AdapterNotFound."""
    record = records.adapter(tx.connection, name)
    tx.connection.execute(delete(tables.aliases).where(tables.aliases.c.name == name))
    for version in record.versions:
        if version.state is VersionState.ACTIVE:
            _close(tx, name, version.number, VersionState.RETIRED, "version_retired", actor)
    if record.aliases:
        tx.record("aliases_removed", actor=actor, name=name, aliases=",".join(sorted(record.aliases)))


def quarantine(tx: Transaction, name: str, number: int, *, actor: str, reason: str) -> None:
    """Stop serving a version at once, whatever points at it. Raises AdapterNotFound."""
    _require(records.adapter(tx.connection, name).version(number) is not None, name, number)
    _close(tx, name, number, VersionState.QUARANTINED, "version_quarantined", actor, reason=reason)


def set_callers(tx: Transaction, name: str, callers: tuple[str, ...], *, actor: str) -> None:
    """Raises AdapterNotFound."""
    if records.adapter(tx.connection, name).callers == callers:
        return
    where = tables.adapters.c.name == name
    tx.connection.execute(update(tables.adapters).where(where).values(callers=list(callers)))
    tx.record("callers_changed", actor=actor, name=name, callers=",".join(callers))


def _close(tx: Transaction, name: str, number: int, state: VersionState, kind: str, actor: str, **detail: str) -> None:
    """Take a version out of service; an activation that waits for it fails."""
    version = records.adapter(tx.connection, name).version(number)
    if version is None or version.state is state:
        return
    _set_state(tx, name, number, state)
    tx.record(kind, actor=actor, name=name, number=number, digest=version.digest, **detail)
    activations.fail_pending(tx, name, number, f"{name}@{number} was taken out of service ({state})")


def _set_state(tx: Transaction, name: str, number: int, state: VersionState) -> None:
    v = tables.versions.c
    tx.connection.execute(update(tables.versions).where(v.name == name, v.number == number).values(state=state))


def _require(found: bool, name: str, number: int) -> None:
    if not found:
        raise AdapterNotFound(f"{name} has no version {number}")
