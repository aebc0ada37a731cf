"""Writes base, adapters and versions. Every function runs inside the caller's transaction."""

from sqlalchemy import delete, func, insert, select, update

from registry import draining, records, residence, rollout, tables
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
    closed = (VersionState.RETIRED, VersionState.COLLECTED)
    in_use = select(func.count()).select_from(tables.versions).where(tables.versions.c.state.not_in(closed))
    if tx.connection.execute(in_use).scalar_one():
        raise Conflict(f"versions exist for the base {digest[:12]}; retire them before publishing another base")
    if tx.connection.execute(select(func.count()).select_from(tables.replicas)).scalar_one():
        raise Conflict(f"replicas are serving the base {digest[:12]}; stop them before publishing another base")


def check_owner(tx_owner: str | None, name: str, owner: str) -> None:
    """Raises Conflict when the name belongs to somebody else."""
    if tx_owner is not None and tx_owner != owner:
        raise Conflict(f"the name {name!r} is taken; choose another one")


def add_version(
    tx: Transaction,
    name: str,
    manifest: AdapterManifest,
    *,
    owner: str,
    keep_manifest: bool,
    callers: tuple[str, ...] = (),
) -> tuple[int, bool]:
    """The number of the version of `name` with this content, and whether it is new. Raises Conflict.

    `keep_manifest` says that a manifest stored earlier under this digest still has its blob; `callers` is the access
    list of a new adapter.
    """
    _ensure_adapter(tx, name, owner, callers)
    _ensure_manifest(tx, manifest, keep_manifest)
    v = tables.versions.c
    known = tx.connection.execute(
        select(v.number, v.state).where(v.name == name, v.digest == manifest.digest)
    ).one_or_none()
    if known is not None:
        _restore(tx, name, known.number, VersionState(known.state), owner)
        return known.number, False
    _refuse_quarantined(tx, manifest.digest)
    last = tx.connection.execute(select(func.max(v.number)).where(v.name == name)).scalar_one() or 0
    tx.connection.execute(
        insert(tables.versions).values(
            name=name, number=last + 1, digest=manifest.digest, state=VersionState.ACTIVE, created_at_s=tx.now_s
        )
    )
    tx.record("version_pushed", actor=owner, name=name, number=last + 1, digest=manifest.digest)
    return last + 1, True


def _ensure_adapter(tx: Transaction, name: str, owner: str, callers: tuple[str, ...]) -> None:
    where = tables.adapters.c.name == name
    found = tx.connection.execute(select(tables.adapters.c.owner).where(where)).scalar_one_or_none()
    check_owner(found, name, owner)
    if found is None:
        tx.connection.execute(
            insert(tables.adapters).values(
                name=name, owner=owner, callers=list(callers), revision=tx.revision, created_at_s=tx.now_s
            )
        )


def _ensure_manifest(tx: Transaction, manifest: AdapterManifest, keep: bool) -> None:
    values = {
        "manifest": manifest.model_dump_json(),
        "blob_sha256": manifest.blob_sha256,
        "num_bytes": manifest.blob_bytes,
        "max_rank": manifest.max_rank,
        "base_verified": manifest.base_verified,
        "target_names": list(manifest.target_names),
    }
    if records.manifest(tx.connection, manifest.digest) is None:
        tx.connection.execute(insert(tables.manifests).values(digest=manifest.digest, **values))
    elif not keep:
        where = tables.manifests.c.digest == manifest.digest
        tx.connection.execute(update(tables.manifests).where(where).values(values))


def _restore(tx: Transaction, name: str, number: int, state: VersionState, actor: str) -> None:
    """Pushing a version that was retired or collected again brings it back; a quarantined one stays out."""
    if state is VersionState.QUARANTINED:
        raise Conflict(f"this content is version {number} of {name!r}, which is quarantined")
    if state is not VersionState.ACTIVE:
        draining.reopen(tx, name, number)
        tx.record("version_restored", actor=actor, name=name, number=number)


def _refuse_quarantined(tx: Transaction, digest: str) -> None:
    """What was quarantined under one name does not come back under another."""
    v = tables.versions.c
    where = (v.digest == digest, v.state == VersionState.QUARANTINED)
    found = tx.connection.execute(select(v.name, v.number).where(*where).limit(1)).one_or_none()
    if found is not None:
        raise Conflict("this content is quarantined")


def retire_version(tx: Transaction, name: str, number: int, *, actor: str, deadline_s: float) -> None:
    """Refuse new requests now, and abort those that run after `deadline_s` seconds; known content stays known.

    Raises AdapterNotFound, and Conflict while an alias points at the version or sends it a canary's share.
    """
    record = records.adapter(tx.connection, name)
    version = record.version(number)
    if version is None:
        raise AdapterNotFound(f"{name} has no version {number}")
    pointing = {alias for alias, target in record.aliases.items() if target == number}
    pointing |= {alias for alias, canary in record.canaries.items() if canary.number == number}
    if pointing:
        listed = ", ".join(sorted(pointing))
        raise Conflict(f"{name}@{number} is the target of {listed}; move or remove the alias first")
    draining.begin(tx, name, version, actor=actor, deadline_s=deadline_s)


def retire_adapter(tx: Transaction, name: str, *, actor: str, deadline_s: float) -> None:
    """Retire every version, remove every alias and end pin and preload; does nothing when that is so already.

    Raises AdapterNotFound.
    """
    record = records.adapter(tx.connection, name)
    tx.connection.execute(delete(tables.aliases).where(tables.aliases.c.name == name))
    for version in record.versions:
        draining.begin(tx, name, version, actor=actor, deadline_s=deadline_s)
    if record.aliases:
        tx.record("aliases_removed", actor=actor, name=name, aliases=",".join(sorted(record.aliases)))
    residence.unpin(tx, name, actor=actor)
    residence.set_preload(tx, name, None, actor=actor)


def quarantine(tx: Transaction, name: str, number: int, *, actor: str, reason: str) -> None:
    """Stop serving a version's content at once, under every name that has it and whatever points at it.

    Requests carry digests: content that is withdrawn under one name only would go on. Raises AdapterNotFound.
    """
    version = records.adapter(tx.connection, name).version(number)
    if version is None:
        raise AdapterNotFound(f"{name} has no version {number}")
    v = tables.versions.c
    same = select(v.name, v.number).where(v.digest == version.digest, v.state != VersionState.QUARANTINED)
    for row in tx.connection.execute(same.order_by(v.name, v.number)).all():
        draining.close(tx, row.name, row.number, VersionState.QUARANTINED)
        about = {"name": row.name, "number": row.number, "digest": version.digest}
        tx.record("version_quarantined", actor=actor, reason=reason, **about)
        rollout.drop_version(tx, row.name, row.number, actor=actor)


def set_callers(tx: Transaction, name: str, callers: tuple[str, ...], *, actor: str) -> None:
    """Raises AdapterNotFound."""
    if records.adapter(tx.connection, name).callers == callers:
        return
    where = tables.adapters.c.name == name
    tx.connection.execute(update(tables.adapters).where(where).values(callers=list(callers)))
    tx.record("callers_changed", actor=actor, name=name, callers=",".join(callers))
