"""The error tree of a replica.

ReplicaError
├── InvalidRequest        the request can never be served as it stands (sampling, prompt length, token ids)
├── UnknownAdapter        the digest was never staged here and no source has it
├── AdapterUnavailable    staging or loading the adapter failed; only the requests that want it fail
├── AdapterWithdrawn      the version was taken out of service: retired and past its deadline, or quarantined
├── AdapterTooLarge       the adapter can never fit the slot arena or the host cache
├── Overloaded            the waiting queue is full
├── ReplicaDraining       the replica takes no new work
├── EngineDead            the step loop died; the replica must be replaced
├── ModelError            the base model cannot be found or cannot be served as it is (at start only)
└── OutOfMemory           the configuration does not fit the device (at start only)
"""


class ReplicaError(Exception):
    """Base of what a replica refuses; `code` is stable and survives pickling."""

    code = "replica_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


class InvalidRequest(ReplicaError):
    code = "invalid_request"


class UnknownAdapter(ReplicaError):
    code = "unknown_adapter"


class AdapterUnavailable(ReplicaError):
    code = "adapter_unavailable"


class AdapterWithdrawn(ReplicaError):
    code = "adapter_withdrawn"


class AdapterTooLarge(ReplicaError):
    code = "adapter_too_large"


class Overloaded(ReplicaError):
    code = "overloaded"


class ReplicaDraining(ReplicaError):
    code = "replica_draining"


class EngineDead(ReplicaError):
    code = "engine_dead"


class ModelError(ReplicaError):
    code = "model_error"


class OutOfMemory(ReplicaError):
    code = "out_of_memory"
