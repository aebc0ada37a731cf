"""What every replica has of one version, as it last reported. Reads only, inside the caller's transaction."""

import hashlib

from sqlalchemy import Connection

from registry import records
from registry.digest import canonical_json
from registry.errors import AdapterNotFound
from registry.types import ReplicaRecord, ReplicaVersionState, StagingState, VersionStates


def of_version(connection: Connection, name: str, number: int) -> VersionStates:
    """Raises AdapterNotFound."""
    adapter = records.adapter(connection, name)
    version = adapter.version(number)
    if version is None:
        raise AdapterNotFound(f"{name} has no version {number}")
    replicas = tuple(_state(replica, version.digest, adapter.revision) for replica in records.replicas(connection))
    content = [version.model_dump(mode="json"), *(state.model_dump(mode="json") for state in replicas)]
    etag = hashlib.sha256(canonical_json(content)).hexdigest()[:16]
    return VersionStates(version=version, replicas=replicas, etag=etag)


def _state(replica: ReplicaRecord, digest: str, revision: int) -> ReplicaVersionState:
    return ReplicaVersionState(
        replica_id=replica.replica_id,
        ring_id=replica.ring_id,
        state=_staging_state(replica, digest),
        is_running=digest in replica.running,
        has_seen=replica.revision >= revision,
        drained=replica.drained,
        error=replica.failed.get(digest),
    )


def _staging_state(replica: ReplicaRecord, digest: str) -> StagingState:
    if digest in replica.failed:
        return StagingState.FAILED
    if digest in replica.resident:
        return StagingState.RESIDENT
    if digest in replica.held:
        return StagingState.HELD
    return StagingState.REMEMBERED if digest in replica.staged else StagingState.ABSENT
