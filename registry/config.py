"""Configuration of the registry: where rows and blobs live, what an upload may be, how long leases last."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from registry.demand import DemandConfig
from registry.source_urls import check_root
from registry.types import EVERYBODY, TemplateRules, TenantLimits
from telemetry.logs import LogConfig

MIB = 1024 * 1024


DAY_S = 24 * 3600.0


class RetentionConfig(BaseModel):
    """What the collector may remove: versions that are retired, or beyond the newest `keep_versions` of their adapter.

    Both only when they are older than `min_age_s` and unused for `unused_s`, and when nothing holds them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_versions: int | None = Field(default=None, ge=1)
    """Newest versions of an adapter that stay; omitted: only what was retired goes."""
    min_age_s: float = Field(default=7 * DAY_S, ge=0)
    unused_s: float = Field(default=7 * DAY_S, ge=0)
    grace_s: float = Field(default=3600.0, ge=0)
    """How long bytes stay after nobody can use their version any more, and how long blobs without a row stay."""
    interval_s: float | None = Field(default=None, gt=0)
    """How often the registry collects by itself; omitted: never."""
    usage_s: float = Field(default=400 * DAY_S, gt=0)
    """How long the usage report reaches back."""


class RegistryConfig(BaseModel):
    """Everything the registry needs to know.

    `database_url` is an SQLAlchemy URL and `blobs_url` a folder or an fsspec URL (`s3://bucket/prefix`); what is
    omitted lives under `data_dir`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path = Path("data")
    database_url: str | None = None
    blobs_url: str | None = None
    max_rank: int = Field(default=256, ge=1, le=256)
    max_adapter_bytes: int = Field(default=2048 * MIB, ge=1)
    max_config_bytes: int = Field(default=MIB, ge=1)
    max_files: int = Field(default=128, ge=1)
    max_unpacked_bytes: int = Field(default=4096 * MIB, ge=1)
    """Bytes that one archive may unpack to, or one source may hold."""
    source_roots: tuple[str, ...] = ()
    """Folders and URLs below which uploads may name a source; see `registry.source_urls`."""
    source_timeout_s: float = Field(default=300.0, gt=0)
    template: TemplateRules = TemplateRules()
    pattern_cpu_s: int = Field(default=1, ge=1)
    """Processor time that the regular expressions of one upload may take, in whole seconds."""
    lease_ttl_s: float = Field(default=10.0, gt=0)
    activation_timeout_s: float = Field(default=300.0, gt=0)
    busy_timeout_s: float = Field(default=30.0, gt=0)
    retire_deadline_s: float = Field(default=60.0, ge=0)
    """How long requests on a retired version may go on, when whoever retires it does not say."""
    on_staging_failure: Literal["block", "drain"] = "block"
    """What a replica that cannot stage a version does: fail the activation, or take no more requests itself."""
    retention: RetentionConfig = RetentionConfig()
    demand: DemandConfig = DemandConfig()
    new_adapters: Literal["private", "public"] = "private"
    """Who besides its owner may call an adapter that nobody has said anything about: nobody, or everybody."""
    tenant_defaults: TenantLimits = TenantLimits(weight=1.0)
    """The limits of a tenant that has none of its own."""
    logs: LogConfig = LogConfig()

    @field_validator("database_url")
    @classmethod
    def _is_durable(cls, url: str | None) -> str | None:
        if url is not None and (url in ("sqlite://", "sqlite:///") or ":memory:" in url):
            raise ValueError("an in-memory database loses what was acknowledged; name a file")
        return url

    @field_validator("source_roots")
    @classmethod
    def _are_roots(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_root(root) for root in roots)

    @property
    def first_callers(self) -> tuple[str, ...]:
        """The access list that a new adapter begins with."""
        return (EVERYBODY,) if self.new_adapters == "public" else ()

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in force."""
        return self.database_url or f"sqlite:///{self.data_dir.expanduser() / 'registry.db'}"

    @property
    def blobs(self) -> str:
        """The folder or fsspec URL in force."""
        return self.blobs_url or str(self.data_dir.expanduser() / "blobs")
