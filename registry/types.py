"""The records of the registry, shared by every folder. They know nothing of how they are stored or sent."""

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

LIVE_ALIAS = "live"
EVERYBODY = "*"
"""In an access list: every tenant."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A sha256 in lower-case hexadecimal."""

NAME_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$"
ALIAS_PATTERN = r"^[a-z](?:[a-z0-9_-]{0,30}[a-z0-9])?$"
KEY_ID_PATTERN = r"^[0-9a-f]{12}$"
AdapterName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
AliasName = Annotated[str, StringConstraints(pattern=ALIAS_PATTERN)]


def is_adapter_name(name: str) -> bool:
    """Whether `name` may name an adapter: 1 to 64 of `A-Z a-z 0-9 . _ -`, alphanumeric at both ends, no `..`."""
    return re.fullmatch(NAME_PATTERN[1:-1], name) is not None and ".." not in name


def is_alias_name(name: str) -> bool:
    """Whether `name` may name an alias: 1 to 32 of `a-z 0-9 _ -`, first a letter, last a letter or digit."""
    return re.fullmatch(ALIAS_PATTERN[1:-1], name) is not None


def is_key_id(text: str) -> bool:
    return re.fullmatch(KEY_ID_PATTERN[1:-1], text) is not None


class Record(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModuleKind(StrEnum):
    """How the base stores a projection's weight: `linear` is (out, in), `conv1d` is (in, out)."""

    LINEAR = "linear"
    CONV1D = "conv1d"


class ModuleSpec(Record):
    """One projection of the base that an adapter may target; `path` is PEFT's, without `base_model.model.`."""

    path: str
    in_features: int
    out_features: int
    kind: ModuleKind = ModuleKind.LINEAR
    sha256: Digest


class BaseSpec(Record):
    """What a replica publishes of its base model.

    `revision` is the commit of the hub or what the configuration says, None when nobody knows. `digest` is sha256 over
    the canonical JSON of `modules` (their weights' digests included), so it is equal on every replica that holds the
    same weights. `tokenizer_sha256` names a blob in the blob store that holds `tokenizer.json`.
    """

    base_id: str
    revision: str | None = None
    digest: Digest
    architecture: str
    modules: tuple[ModuleSpec, ...]
    context_length: int
    vocab_size: int
    tokenizer_sha256: Digest
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]


class TensorInfo(Record):
    """A tensor inside an adapter's safetensors file: its key there, dtype (`F32`, `F16`, `BF16`) and shape."""

    key: str
    dtype: Literal["F32", "F16", "BF16"]
    shape: tuple[int, ...]
    sha256: Digest


class ModuleLora(Record):
    """The LoRA pair of one module: A is (rank, in), B is (out, rank), the delta is `scale` * B @ A.

    A factor of several blocks is block-diagonal and stored without its zeros: A as (rank, in / a_blocks), B as
    (out, rank / b_blocks); whoever stages it expands it.
    """

    path: str
    rank: int
    alpha: float
    scale: float
    a: TensorInfo
    b: TensorInfo
    a_blocks: int = 1
    b_blocks: int = 1


class Fault(Record):
    """One thing wrong (or, as a warning, suspicious) with an upload."""

    code: str
    message: str
    hint: str | None = None
    field: str | None = None


class BaseBinding(Record):
    """The base that an upload was checked against, and what spoke for it.

    `verified_by`: the upload's own record of the base's `digest`, its name together with the `revision`, its `name`,
    or no more than that all `shapes` fit.
    """

    base_id: str
    revision: str | None = None
    digest: Digest
    tokenizer_sha256: Digest
    vocab_size: int
    verified_by: Literal["digest", "revision", "name", "shapes"]


class AdapterManifest(Record):
    """Everything a replica needs to stage a version: the LoRA pairs and the blob that holds their tensors.

    `base_verified` is false when the upload did not say for which base it was trained.
    """

    digest: Digest
    base_digest: Digest
    base_verified: bool
    base: BaseBinding | None = None
    modules: tuple[ModuleLora, ...]
    blob_sha256: Digest
    blob_bytes: int
    warnings: tuple[Fault, ...] = ()

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The last path components that the adapter touches, sorted (`q_proj`, `v_proj`)."""
        return tuple(sorted({module.path.rpartition(".")[2] for module in self.modules}))


class VersionState(StrEnum):
    """Only `active` versions take requests; of `draining` ones those that run may end.

    `retired` and `quarantined` ones are nowhere served. A `collected` one is its row alone: its bytes are gone.
    """

    ACTIVE = "active"
    DRAINING = "draining"
    RETIRED = "retired"
    QUARANTINED = "quarantined"
    COLLECTED = "collected"


class VersionRecord(Record):
    """A version as the catalog carries it: the manifest is fetched by digest when bytes are needed."""

    number: int
    digest: Digest
    state: VersionState
    created_at_s: float
    num_bytes: int
    max_rank: int
    target_names: tuple[str, ...]
    drain_until_s: float | None = None
    """When what still runs on a draining version is aborted."""
    base_verified: bool = True
    """False when the upload did not say for which base it was trained."""


class Canary(Record):
    """A version that takes the share `weight` (above 0, at most 1) of an alias's keys."""

    number: int
    weight: float


LEAST_PRELOAD_S = 60
MOST_PRELOAD_S = 30 * 24 * 3600


class Preload(Record):
    """When an adapter is brought to its homes ahead of its requests: every `every_s`, or each day at `at`, in UTC."""

    every_s: float | None = Field(default=None, ge=LEAST_PRELOAD_S, le=MOST_PRELOAD_S)
    at: str | None = Field(default=None, pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")

    @model_validator(mode="after")
    def _is_one(self) -> "Preload":
        if (self.every_s is None) == (self.at is None):
            raise ValueError("say either `every_s` or `at`")
        return self


class AdapterRecord(Record):
    """An adapter with its versions and aliases. `revision` is the last change to any of them."""

    name: AdapterName
    owner: str
    callers: tuple[str, ...] = ("*",)
    revision: int
    created_at_s: float
    aliases: dict[str, int] = Field(default_factory=dict)
    versions: tuple[VersionRecord, ...] = ()
    pending: tuple[Digest, ...] = ()
    """Digests of activations that are waiting for replicas."""
    canaries: dict[str, Canary] = Field(default_factory=dict)
    """Alias -> the version that takes a share of its requests."""
    previous: dict[str, int] = Field(default_factory=dict)
    """Alias -> the version it pointed at before, which stays staged."""
    pinned: bool = False
    """Whether the version that `live` points at stays in a slot of every replica."""
    preload: Preload | None = None

    def version(self, number: int) -> VersionRecord | None:
        return next((version for version in self.versions if version.number == number), None)


class AdapterAccess(Record):
    """Whose an adapter is and who may call it."""

    owner: str
    callers: tuple[str, ...]

    def may_call(self, tenant: str) -> bool:
        return tenant == self.owner or tenant in self.callers or EVERYBODY in self.callers


class ReplicaRecord(Record):
    """A replica with a live lease. `ring_id` is the lowest free ordinal, kept for the life of the replica.

    Only one that came to replace a dead replica moves, to the place of that one when its lease ends.
    """

    replica_id: str
    ring_id: int
    node_id: str
    num_slots: int
    revision: int
    """Catalog revision the replica has acted upon."""
    staged: tuple[Digest, ...] = ()
    """What it can serve: the manifest is on its node, the bytes too or on demand."""
    held: tuple[Digest, ...] = ()
    """What has its bytes on the node."""
    resident: tuple[Digest, ...] = ()
    failed: dict[str, str] = Field(default_factory=dict)
    """Digest -> why it could not be staged."""
    running: tuple[Digest, ...] = ()
    """What requests are being served with."""
    drained: str | None = None
    """Why no new requests go to it, None while they do."""

    @property
    def is_ready(self) -> bool:
        return self.drained is None


class ReplicaReport(Record):
    """What a replica says of itself when it renews its lease, in the words of `ReplicaRecord`.

    `staged` leaves out a version that an activation of this `revision` waits for until its bytes have been brought.
    """

    replica_id: str
    revision: int
    staged: tuple[Digest, ...]
    held: tuple[Digest, ...] = ()
    resident: tuple[Digest, ...] = ()
    failed: dict[str, str] = Field(default_factory=dict)
    running: tuple[Digest, ...] = ()


class Scope(StrEnum):
    """What a key allows; every route that is not public names one."""

    INFER = "infer"
    UPLOAD = "upload"
    ADMIN = "admin"
    METRICS = "metrics"
    """For scrapers; `admin` includes it."""


class TenantLimits(Record):
    """What a tenant may use; None is no limit. Of a tenant's own row, None is what the configuration says."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Prompts in flight, over all gateways."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Prompts in any 60 s, over all gateways."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and output tokens in any 60 s, over all gateways."""
    max_adapters: int | None = Field(default=None, ge=0)
    """Adapters that it owns and that have a version which was not collected."""
    max_stored_bytes: int | None = Field(default=None, ge=0)
    """Bytes of its versions that were not collected; equal content counts once."""
    max_slots: int | None = Field(default=None, ge=1)
    """Adapter slots of a replica that its requests may hold at once."""
    weight: float | None = Field(default=None, gt=0, le=1000)
    """Its share of a replica's work against other tenants; 1 where nothing says otherwise."""

    def over(self, defaults: "TenantLimits") -> "TenantLimits":
        """These limits, and those of `defaults` where these say nothing."""
        said = {name: value for name, value in self if value is not None}
        return defaults.model_copy(update=said)


TenantName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
KeyId = Annotated[str, StringConstraints(pattern=KEY_ID_PATTERN)]


class TenantRecord(Record):
    """A tenant: `limits` are its own words, `effective` what holds with the configuration's defaults."""

    name: TenantName
    created_at_s: float
    limits: TenantLimits = TenantLimits()
    effective: TenantLimits = TenantLimits()
    num_adapters: int = 0
    stored_bytes: int = 0


class KeyRecord(Record):
    """What may be told of an API key. Nothing here lets anybody in."""

    key_id: KeyId
    tenant: TenantName
    scopes: tuple[Scope, ...]
    created_at_s: float
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    used_at_s: float | None = None
    """Last use, to within a minute or so."""
    note: str = ""


class NewKey(Record):
    """A key that was just made. `secret` is shown this once and stored nowhere."""

    key: KeyRecord
    secret: str = Field(repr=False)


class KeyHash(Record):
    """What a gateway needs to know a key again: sha256 over `salt` and the secret, both as bytes."""

    key_id: KeyId
    tenant: str
    scopes: tuple[Scope, ...]
    salt: str = Field(repr=False)
    hash: str = Field(repr=False)
    expires_at_s: float | None = None


class Access(Record):
    """Who may come in: every key that was not revoked, and the limits of tenants.

    `has_keys` stays true once there was a key: a server whose last key expired does not open itself.
    """

    has_keys: bool
    keys: tuple[KeyHash, ...] = ()
    limits: dict[str, TenantLimits] = Field(default_factory=dict)
    """Tenant -> the limits that hold for it."""
    defaults: TenantLimits = TenantLimits()
    """The limits of tenants without a row."""


class LimitUse(Record):
    """What a gateway says of one limit of a tenant: what it keeps for itself from now on, and what it could use."""

    tenant: str
    limit: str
    held: Annotated[int, Field(ge=0)]
    wanted: Annotated[int, Field(ge=0)]


class LimitShare(Record):
    """A gateway's part of a tenant's limit. It may use `granted`, and should come down to `target`.

    The granted parts of all gateways never add up to more than the limit.
    """

    tenant: str
    limit: str
    granted: int
    target: int


class CatalogDelta(Record):
    """What changed in the catalog after some revision; with `full`, everything there is.

    Adapters come as whole records. `replicas` and `base` are always the whole truth. `access` is for gateways, and
    whole when it changed.
    """

    revision: int
    full: bool
    adapters: tuple[AdapterRecord, ...]
    replicas: tuple[ReplicaRecord, ...]
    base: BaseSpec | None
    access: Access | None = None


class TemplateRules(Record):
    """What adapters of this fleet should look like; an empty list allows anything. `policy` says what happens to
    uploads that differ: a warning, or a refusal."""

    policy: Literal["warn", "refuse"] = "warn"
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = ()
    targets: tuple[str, ...] = ()
    """Last parts of module paths, as in `q_proj`."""
    dtypes: tuple[Literal["F32", "F16", "BF16"], ...] = ()


class FleetTemplate(Record):
    """What a training run needs to know of the fleet. `targets` are the module names of the base that may be
    targeted, by the rules where they say, else all; `base` is None while no base has been published."""

    rules: TemplateRules
    max_rank: int
    targets: tuple[str, ...]
    base: BaseBinding | None


class AdapterSource(Record):
    """Where an adapter lies: a URL under one of the configured roots; `revision` pins a hub repository's commit."""

    url: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    revision: Annotated[str, StringConstraints(max_length=64)] | None = None


class ActivationState(StrEnum):
    """`pending` until every ready replica has staged the version, then `flipped`, then `done` when gateways agree."""

    PENDING = "pending"
    FLIPPED = "flipped"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


UNDER_WAY = (ActivationState.PENDING, ActivationState.FLIPPED)
"""The states in which an activation has not ended."""


class Activation(Record):
    """A durable wish to point an alias at a version."""

    activation_id: int
    name: AdapterName
    alias: AliasName
    number: int
    digest: Digest
    state: ActivationState
    requested_at_s: float
    flipped_revision: int | None = None
    waiting_for: tuple[str, ...] = ()
    """Replica or gateway ids that have not acknowledged yet."""
    error: str | None = None
    staged_after_s: float | None = None
    """Seconds from the request to the flip."""
    weight: float | None = None
    """Of a canary: the share of the alias's keys that it shall take. None moves the alias itself."""


class PushResult(Record):
    """The answer to an upload. `created` is false when the same content was already a version of this name."""

    name: AdapterName
    version: VersionRecord
    created: bool
    warnings: tuple[Fault, ...] = ()
    activation: Activation | None = None


class Event(Record):
    """One entry of the append-only change log."""

    revision: int
    at_s: float
    kind: str
    name: str | None = None
    number: int | None = None
    digest: Digest | None = None
    actor: str
    detail: dict[str, str] = Field(default_factory=dict)


class AuditEntry(Event):
    """An entry of the change log with its place in the chain of hashes."""

    previous_hash: Digest
    hash: Digest


class AuditPage(Record):
    """Entries of the change log, and the entry that was the last one at that moment."""

    entries: tuple[AuditEntry, ...]
    head_revision: int
    head_hash: Digest


class StagingState(StrEnum):
    """What one replica has of one version, from nothing to a slot. `remembered` fetches the bytes when asked."""

    ABSENT = "absent"
    FAILED = "failed"
    REMEMBERED = "remembered"
    HELD = "held"
    RESIDENT = "resident"


class ReplicaVersionState(Record):
    """One replica's word on one version."""

    replica_id: str
    ring_id: int
    state: StagingState
    is_running: bool
    has_seen: bool
    """Whether the replica has acted upon the adapter's last change."""
    drained: str | None = None
    error: str | None = None


class VersionStates(Record):
    """Where a version is. `etag` changes with the states, so that a watcher can wait for another one."""

    version: VersionRecord
    replicas: tuple[ReplicaVersionState, ...]
    etag: str


class CollectAction(StrEnum):
    """`retire`: out of service now, collected by a later run. `keep`: due, but something holds it."""

    RETIRE = "retire"
    COLLECT = "collect"
    SWEEP = "sweep"
    KEEP = "keep"


class CollectItem(Record):
    """One version, or with `sweep` one blob without a row, and why it goes or stays."""

    action: CollectAction
    why: str
    num_bytes: int
    name: str | None = None
    number: int | None = None
    digest: Digest | None = None
    blob_sha256: Digest | None = None


class CollectReport(Record):
    """What a run of the collector did, or with `dry_run` would do."""

    dry_run: bool
    items: tuple[CollectItem, ...]
    freed_bytes: int
