"""What requests used: as gateways and replicas tell it, and as the report shows it."""

from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import Field, StringConstraints

from registry.types import Record

Count = Annotated[int, Field(ge=0)]
HOUR_S = 3600
DAY_S = 24 * HOUR_S


class Consumer(NamedTuple):
    """Whose use, and of what: a tenant and a version. For the base model `name`, `number` and `digest` are None."""

    tenant: str
    name: str | None = None
    number: int | None = None
    digest: str | None = None


class UsageEntry(Record):
    """What one consumer used in one hour, which begins at `hour_s` seconds of the epoch."""

    hour_s: int
    tenant: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    name: str | None = None
    number: int | None = None
    digest: str | None = None
    requests: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    device_ns: Count = 0


class UsageBatch(Record):
    """Entries that one process hands over together. A `source` counts its batches from 1, and repeats one, unchanged,
    until it is acknowledged."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    sequence: Annotated[int, Field(ge=1)]
    entries: tuple[UsageEntry, ...]


class UsageGroup(StrEnum):
    """What a report can be broken down by; `version` implies `adapter`."""

    HOUR = "hour"
    DAY = "day"
    TENANT = "tenant"
    ADAPTER = "adapter"
    VERSION = "version"


class UsageRow(Record):
    """Sums over all that agree in the groups asked for; the fields of other groups are None.

    `start_s` is the beginning of the hour or day, UTC. The base model has no `adapter`, `version` and `digest`.
    """

    start_s: int | None = None
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None
    digest: str | None = None
    requests: int
    prompt_tokens: int
    output_tokens: int
    device_ns: int

    @property
    def device_s(self) -> float:
        """Seconds of a replica's device."""
        return self.device_ns / 1e9


class UsageReport(Record):
    """The rows of the hours that begin in [`from_s`, `to_s`), sorted; not `is_whole` when there would be more."""

    from_s: int
    to_s: int
    group_by: tuple[UsageGroup, ...]
    rows: tuple[UsageRow, ...]
    is_whole: bool = True
