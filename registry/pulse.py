"""What changes from second to second: loads, residency, demand. Kept in memory, never in the database.

Replicas and gateways tell the registry with their heartbeats, and gateways hear it with the answer. To lose all of it
costs speed for some seconds and nothing else.
"""

from pydantic import Field

from registry.types import Digest, Record, ReplicaRecord


class ReplicaLoad(Record):
    """What a replica is doing at this moment."""

    num_waiting: int = 0
    num_running: int = 0
    num_loading: int = 0
    num_free_kv_blocks: int = 0
    num_kv_blocks: int = 0


class ReplicaState(ReplicaRecord):
    """A replica with what a gateway knows of its load at this moment."""

    load: ReplicaLoad | None = None
    """The replica's own word; None when nothing recent is known."""
    num_requests: int = 0
    """Requests that gateways have there."""
    load_bound: int | None = None
    """At so many requests it takes no more while others have room; None for one that takes none."""


class Residency(Record):
    """Which versions a replica has at hand: in a slot, or in host memory."""

    resident: tuple[Digest, ...] = ()
    host_cached: tuple[Digest, ...] = ()


class ReplicaPulse(Record):
    """A replica's heartbeat."""

    load: ReplicaLoad
    residency: Residency


class HomePlan(Record):
    """How many homes adapters have. All gateways follow the plan with the highest `epoch`.

    `active` are the names in use, sorted; none while nobody knows. What `num_homes` leaves out has one home.
    """

    epoch: int = 0
    active: tuple[str, ...] = ()
    num_homes: dict[str, int] = Field(default_factory=dict)


class GatewayPulse(Record):
    """A gateway's heartbeat.

    `busy_s` are request-seconds by adapter since the heartbeat before, which was `interval_s` ago; `base_busy_s` the
    same of the base. `in_flight` are its requests by replica. `gone` are replicas that were running and are no more.
    `board_id` and `seen` say which news it has had, `epoch` which plan it follows; `plan` is that plan when the board
    is a new one, which has yet to learn it.
    """

    gateway_id: str
    interval_s: float
    busy_s: dict[str, float] = Field(default_factory=dict)
    base_busy_s: float = 0.0
    in_flight: dict[str, int] = Field(default_factory=dict)
    gone: tuple[str, ...] = ()
    board_id: str = ""
    seen: int = 0
    epoch: int = 0
    plan: HomePlan | None = None


class FleetPulse(Record):
    """The answer: what is new since `seen`, and `in_flight` of the other gateways together.

    `num_gateways` counts whoever asks, too.
    """

    board_id: str
    seen: int
    plan: HomePlan | None
    """None while there is no newer one than the gateway's."""
    in_flight: dict[str, int]
    num_gateways: int = 1
    loads: dict[str, ReplicaLoad]
    residency: dict[str, Residency]
    """Of those replicas only whose residency changed since `seen`."""
