"""The tables of the registry, as the last step in `registry/migrations` leaves them.

Rows are never deleted but for aliases, leases, and use past its retention; blobs live elsewhere.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("audit_hash", String(64), nullable=False, server_default="0" * 64),
)
base = Table(
    "base",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("spec", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),
)
adapters = Table(
    "adapters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("callers", JSON, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
    Column("created_at_s", Float, nullable=False),
)
manifests = Table(
    "manifests",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("manifest", Text, nullable=False),
    Column("blob_sha256", String(64), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("target_names", JSON, nullable=False),
    Column("base_verified", Boolean, nullable=False, server_default=false()),
)
versions = Table(
    "versions",
    metadata,
    Column("name", String(64), ForeignKey("adapters.name"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("digest", String(64), ForeignKey("manifests.digest"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at_s", Float, nullable=False),
    Column("closed_revision", BigInteger),
    Column("closed_at_s", Float),
    Column("drain_until_s", Float),
    Column("quiet_at_s", Float),
    Column("used_at_s", Float),
    UniqueConstraint("name", "digest"),
    Index("versions_by_state", "state"),
)
aliases = Table(
    "aliases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("alias", String(32), primary_key=True),
    Column("number", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("previous_number", Integer),
    Column("canary_number", Integer),
    Column("canary_weight", Float),
    ForeignKeyConstraint(["name", "number"], ["versions.name", "versions.number"]),
)
alias_history = Table(
    "alias_history",
    metadata,
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(64), nullable=False),
    Column("alias", String(32), nullable=False),
    Column("number", Integer, nullable=False),
    Index("alias_history_by_alias", "name", "alias"),
)
activations = Table(
    "activations",
    metadata,
    Column("activation_id", Integer, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("alias", String(32), nullable=False),
    Column("number", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("actor", Text, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("requested_at_s", Float, nullable=False),
    Column("requested_revision", BigInteger, nullable=False),
    Column("flipped_revision", BigInteger),
    Column("staged_after_s", Float),
    Column("error", Text),
    Column("weight", Float),
    ForeignKeyConstraint(["name", "number"], ["versions.name", "versions.number"]),
)
replicas = Table(
    "replicas",
    metadata,
    Column("replica_id", String(128), primary_key=True),
    Column("ring_id", Integer, nullable=False, unique=True),
    Column("node_id", Text, nullable=False),
    Column("num_slots", Integer, nullable=False),
    Column("base_digest", String(64), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("staged", JSON, nullable=False),
    Column("held", JSON, nullable=False),
    Column("resident", JSON, nullable=False),
    Column("failed", JSON, nullable=False),
    Column("joined_at_s", Float, nullable=False),
    Column("renewed_at_s", Float, nullable=False),
    Column("expires_at_s", Float, nullable=False),
    Column("running", JSON, nullable=False, server_default="[]"),
    Column("drained", Text),
)
gateways = Table(
    "gateways",
    metadata,
    Column("gateway_id", String(128), primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("expires_at_s", Float, nullable=False),
    Column("held", JSON, nullable=False, server_default="{}"),
    Column("wanted", JSON, nullable=False, server_default="{}"),
    Column("share_number", BigInteger, nullable=False, server_default="0"),
)
tenants = Table(
    "tenants",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("limits", JSON, nullable=False),
    Column("created_at_s", Float, nullable=False),
    Column("removed_at_s", Float),
    Column("revision", BigInteger, nullable=False),
)
keys = Table(
    "keys",
    metadata,
    Column("key_id", String(12), primary_key=True),
    Column("tenant", String(64), ForeignKey("tenants.name"), nullable=False),
    Column("salt", String(32), nullable=False),
    Column("hash", String(64), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("note", Text, nullable=False),
    Column("created_at_s", Float, nullable=False),
    Column("expires_at_s", Float),
    Column("revoked_at_s", Float),
    Column("used_at_s", Float),
    Column("revision", BigInteger, nullable=False),
    Index("keys_by_tenant", "tenant"),
)
events = Table(
    "events",
    metadata,
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    Column("at_s", Float, nullable=False),
    Column("kind", String(40), nullable=False),
    Column("name", String(64)),
    Column("number", Integer),
    Column("digest", String(64)),
    Column("actor", Text, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("hash", String(64), nullable=False, server_default=""),
)
usage = Table(
    "usage",
    metadata,
    Column("hour_s", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", String(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("digest", String(64), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("device_ns", BigInteger, nullable=False),
)
usage_sources = Table(
    "usage_sources",
    metadata,
    Column("source", String(200), primary_key=True),
    Column("sequence", BigInteger, nullable=False),
    Column("seen_at_s", Float, nullable=False),
)
