"""The error tree of the registry.

RegistryError
├── InvalidAdapter       the upload breaks one or more rules; carries every fault
├── AdapterNotFound      no such adapter, version or alias
├── ModelNotFound        a request's `model` names nothing this tenant may call
├── Conflict             a compare-and-set lost, or a name is taken by another owner
├── NotReady             no base model has been published yet, or no replica is ready
│   └── RegistryUnavailable  the registry itself cannot be reached
├── StagingFailed        a replica reported that it cannot stage the version
├── TenantNotFound       no such tenant
├── KeyNotFound          no such API key
├── QuotaExceeded        a tenant has as many adapters, or stores as many bytes, as it may
├── LimitExceeded        an upload is larger, or has more entries, than the configuration allows
├── SourceRefused        a source is under no allowed root, leads out of it, or is not pinned
├── SourceNotFound       there is nothing at the source
├── SourceUnavailable    the source cannot be read: no such service, no driver, no permission
├── BlobNotFound         no blob has this sha256
├── SchemaMismatch       the database belongs to a newer program, or is no registry
├── AuditBroken          the change log was changed after it was written
├── BackupFailed         a backup is not whole, or there is no place for what it holds
└── JoinRefused          a replica lacks a version it must hold, or its base differs; carries the missing digests
"""

from registry.types import Fault


class RegistryError(Exception):
    """Base of everything the registry refuses; `code` is stable and goes into the OpenAI error body."""

    code = "registry_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


class InvalidAdapter(RegistryError):
    """The upload cannot be served; `faults` lists everything that is wrong with it."""

    code = "invalid_adapter"

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults

    def __reduce__(self) -> tuple[object, ...]:
        return (InvalidAdapter, (self.faults,))


class AdapterNotFound(RegistryError):
    code = "adapter_not_found"


class ModelNotFound(RegistryError):
    code = "model_not_found"


class Conflict(RegistryError):
    code = "conflict"


class NotReady(RegistryError):
    code = "not_ready"


class RegistryUnavailable(NotReady):
    code = "registry_unavailable"


class StagingFailed(RegistryError):
    code = "staging_failed"


class LimitExceeded(RegistryError):
    code = "limit_exceeded"


class TenantNotFound(RegistryError):
    code = "tenant_not_found"


class KeyNotFound(RegistryError):
    code = "key_not_found"


class QuotaExceeded(RegistryError):
    """`limit` names the limit, as in `TenantLimits`."""

    code = "quota_exceeded"

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return (QuotaExceeded, (self.message, self.limit))


class SourceRefused(RegistryError):
    code = "source_refused"


class SourceNotFound(RegistryError):
    code = "source_not_found"


class SourceUnavailable(RegistryError):
    code = "source_unavailable"


class BlobNotFound(RegistryError):
    code = "blob_not_found"


class SchemaMismatch(RegistryError):
    code = "schema_mismatch"


class AuditBroken(RegistryError):
    code = "audit_broken"


class BackupFailed(RegistryError):
    code = "backup_failed"


class JoinRefused(RegistryError):
    """`missing` lists the digests that the replica must stage before it may join; empty when it can never join."""

    code = "join_refused"

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[object, ...]:
        return (JoinRefused, (self.message, self.missing))
