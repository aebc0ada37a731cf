"""Configuration of a gateway: limits of a request, of an upload, and the bounds of placement."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KIB = 1024
MIB = 1024 * KIB


class Settings(BaseModel):
    """A frozen, strict model that refuses misspelt keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PlacementConfig(Settings):
    """How far a request may stray from its adapter's home.

    A replica takes a request while its load is below max(min_load_bound, ceil(load_factor * (total + 1) / replicas)),
    where each of G gateways counts requests of the others, of which it hears late, as 1 / G each. At most
    ceil(home_factor * adapters / replicas) adapters share a home.
    """

    load_factor: float = Field(default=1.25, ge=1)
    min_load_bound: int = Field(default=16, ge=1)
    home_factor: float = Field(default=1.1, ge=1)
    suspect_s: float = Field(default=2.0, ge=0)
    """How long a replica that was found gone or draining is asked last; twice as long each time it happens again."""
    max_tries: int = Field(default=3, ge=1, le=16)
    """Replicas asked until the error is the client's: before a stream's first token, before a whole answer's end."""
    weigh_slots: bool = True
    """Whether replicas with more slots take more homes and more load."""
    pulse_s: float = Field(default=1.0, gt=0, le=60)
    """How often a gateway tells the registry its loads and hears those of the fleet."""
    news_stale_s: float = Field(default=3.0, gt=0)
    """News of the fleet that is older counts for nothing."""
    silence_s: float = Field(default=5.0, gt=0)
    """When a replica has said nothing on a request for so long, it is asked whether it makes progress."""
    probe_timeout_s: float = Field(default=5.0, gt=0)
    """Without an answer to that within this time, the replica counts as gone."""

    def for_rows(self, num_rows: int) -> "PlacementConfig":
        """With `min_load_bound` at most the rows of a replica: a home gets no more than it can run while others have
        room."""
        return self.model_copy(update={"min_load_bound": min(self.min_load_bound, num_rows)})


class RequestLimits(Settings):
    """What one inference request may ask for."""

    max_body_bytes: int = Field(default=8 * MIB, ge=1)
    max_header_bytes: int = Field(default=32 * KIB, ge=1 * KIB)
    """Path, query and headers together."""
    max_json_items: int = Field(default=300_000, ge=1)
    """Commas in a JSON body: what reading it into values costs grows with them, and nothing else runs meanwhile."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client may take to send a JSON body."""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """How long a client may leave a piece of a stream unread."""
    default_max_tokens: int | None = Field(default=None, ge=1)
    """Tokens to generate when the client does not say; omitted: up to the end of the context."""
    max_n: int = Field(default=16, ge=1, le=128)
    max_prompts: int = Field(default=128, ge=1)
    """Prompts of one completion request."""
    max_logprobs: int = Field(default=20, ge=0)
    max_stop: int = Field(default=16, ge=1)
    max_stop_chars: int = Field(default=1000, ge=1)
    max_logit_bias: int = Field(default=1024, ge=1)
    max_stop_token_ids: int = Field(default=256, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_concurrent_requests: int = Field(default=1024, ge=1)
    """Prompts in flight through this gateway; beyond it clients get 429."""


class UploadLimits(Settings):
    """What one adapter upload may hold; the registry has its own, stricter rules on the content."""

    max_upload_bytes: int = Field(default=4096 * MIB, ge=1)
    max_files: int = Field(default=16, ge=1)
    max_fields: int = Field(default=16, ge=1)
    max_field_bytes: int = Field(default=4 * KIB, ge=1)
    idle_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client may send nothing in the middle of an upload."""
    upload_timeout_s: float = Field(default=3600.0, gt=0)
    """How long an upload may take to arrive."""


class MetricsConfig(Settings):
    """How many adapters and tenants have series of their own; later ones share those of `_other`."""

    max_adapters: int = Field(default=2000, ge=1)
    """Versions that have been called and are in service, the base among them."""
    max_tenants: int = Field(default=1000, ge=1)


class RouterConfig(Settings):
    """Everything a gateway needs to know."""

    placement: PlacementConfig = PlacementConfig()
    requests: RequestLimits = RequestLimits()
    uploads: UploadLimits = UploadLimits()
    metrics: MetricsConfig = MetricsConfig()
    activation_wait_s: float = Field(default=60.0, ge=0)
    """Longest time that an upload or an activation holds its HTTP request to see the alias move."""
    max_events: int = Field(default=1000, ge=1)
    """Most entries one call to `/v1/events` returns."""
    keys: Literal["auto", "required", "ignored"] = "auto"
    """Who may call. `auto`: while there has never been a key, everybody, and only where the server listens on loopback;
    afterwards those that have one. `ignored`: everybody always, for a proxy in front that knows its callers."""
    instance: str = "gateway"
    """Value of the `instance` label of this gateway's own metrics."""
