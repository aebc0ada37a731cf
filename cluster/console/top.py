"""What `lorafleet top` shows: each replica's slots, queue and rates, and the busiest adapters."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.live import Live

from cluster.console import scrape
from cluster.console.client import ControlClient
from cluster.console.errors import Refused
from cluster.console.render import Grid, Output, count, rich_table
from cluster.console.scrape import Scrape
from registry.types import ReplicaRecord

NUM_TOP_ADAPTERS = 10
UNKNOWN = "-"

Sleep = Callable[[float], None]


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica now; rates are over the last interval, None where its metrics are missing."""

    ring_id: int
    replica_id: str
    num_slots: int
    num_resident: int
    num_staged: int
    num_running: float | None
    num_waiting: float | None
    kv_used: float | None
    tokens_per_s: float | None
    loads_per_s: float | None
    hit_rate: float | None


@dataclass(frozen=True)
class AdapterLoad:
    model: str
    num_requests: float
    requests_per_s: float


@dataclass(frozen=True)
class Frame:
    at_s: float
    tokens_per_s: float
    replicas: tuple[ReplicaLoad, ...]
    adapters: tuple[AdapterLoad, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_top(client: ControlClient, output: Output, *, interval_s: float, once: bool, sleep: Sleep = time.sleep) -> None:
    """Draw frames until interrupted, in place on a terminal; with `once`, one frame."""
    frames = _frames(client, interval_s, sleep)
    if output.as_json or once or not output.out.is_terminal:
        for frame in frames:
            _print(frame, output)
            if once:
                return
    with Live(console=output.out, auto_refresh=False, screen=True) as live:
        for frame in frames:
            live.update(Group(*(rich_table(grid) for grid in frame_grids(frame))), refresh=True)


def _frames(client: ControlClient, interval_s: float, sleep: Sleep) -> Iterator[Frame]:
    """A frame each interval; the first takes one interval too, since rates need two scrapes."""
    before = _scrape(client)
    while True:
        sleep(interval_s)
        after = _scrape(client)
        yield build_frame(client.replicas(), before, after)
        before = after


def _scrape(client: ControlClient) -> Scrape:
    text = client.metrics()
    try:
        return scrape.read_scrape(text, time.time())
    except (ValueError, KeyError) as error:
        raise Refused(f"{client.url}/metrics is not Prometheus text: {error}", code="unexpected_answer") from None


def build_frame(replicas: list[ReplicaRecord], before: Scrape, after: Scrape) -> Frame:
    loads = (_load(replica, before, after) for replica in sorted(replicas, key=lambda replica: replica.ring_id))
    adapters = (AdapterLoad(*rate) for rate in scrape.request_rates(before, after)[:NUM_TOP_ADAPTERS])
    return Frame(after.at_s, scrape.tokens_per_second(before, after), tuple(loads), tuple(adapters))


def _load(replica: ReplicaRecord, before: Scrape, after: Scrape) -> ReplicaLoad:
    instance = replica.replica_id
    return ReplicaLoad(
        ring_id=replica.ring_id,
        replica_id=instance,
        num_slots=replica.num_slots,
        num_resident=_num_resident(replica, after),
        num_staged=len(replica.staged),
        num_running=after.value(instance, scrape.RUNNING),
        num_waiting=after.value(instance, scrape.WAITING),
        kv_used=_kv_used(after, instance),
        tokens_per_s=scrape.per_second(before, after, instance, scrape.TOKENS),
        loads_per_s=scrape.per_second(before, after, instance, scrape.LOADS),
        hit_rate=scrape.hit_rate(before, after, instance),
    )


def _num_resident(replica: ReplicaRecord, now: Scrape) -> int:
    """From the metrics, which are of this moment; the registry's record may lag."""
    idle, pinned = (now.value(replica.replica_id, figure) for figure in (scrape.SLOTS_IDLE, scrape.SLOTS_PINNED))
    return len(replica.resident) if idle is None or pinned is None else int(idle + pinned)


def _kv_used(now: Scrape, instance: str) -> float | None:
    used, free = now.value(instance, scrape.KV_USED), now.value(instance, scrape.KV_FREE)
    return used / (used + free) if used is not None and free is not None and used + free else None


def frame_grids(frame: Frame) -> tuple[Grid, Grid]:
    return _replicas_grid(frame), _adapters_grid(frame)


def _replicas_grid(frame: Frame) -> Grid:
    headers = ("RING", "REPLICA", "SLOTS", "STAGED", "RUNNING", "WAITING", "KV", "TOKENS/S", "SWAPS/S", "HITS")
    rows = [
        (
            str(load.ring_id),
            load.replica_id,
            f"{load.num_resident}/{load.num_slots}",
            str(load.num_staged),
            _number(load.num_running),
            _number(load.num_waiting),
            _percent(load.kv_used),
            _number(load.tokens_per_s),
            _number(load.loads_per_s, digits=2),
            _percent(load.hit_rate),
        )
        for load in frame.replicas
    ]
    return Grid(headers, rows, title=_title(frame), right=frozenset(headers) - {"REPLICA"})


def _adapters_grid(frame: Frame) -> Grid:
    rows = [(load.model, _number(load.num_requests), _number(load.requests_per_s, digits=1)) for load in frame.adapters]
    return Grid(("ADAPTER", "REQUESTS", "REQUESTS/S"), rows, right=frozenset({"REQUESTS", "REQUESTS/S"}))


def _title(frame: Frame) -> str:
    swaps = sum(load.loads_per_s or 0.0 for load in frame.replicas)
    at = time.strftime("%H:%M:%S", time.localtime(frame.at_s))
    return f"{at}  {count(len(frame.replicas), 'replica')}, {frame.tokens_per_s:.0f} tokens/s, {swaps:.2f} swaps/s"


def _print(frame: Frame, output: Output) -> None:
    output.value(frame.as_json())
    for grid in frame_grids(frame):
        output.grid(grid)


def _number(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"
