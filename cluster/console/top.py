"""What `lorafleet top` shows, from the same report as the dashboard: what stands out, replicas, tenants, adapters."""

import time
from collections.abc import Callable, Iterator

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.console.client import ControlClient
from cluster.console.render import Grid, Output, count, one_line, rich_table
from router.view.records import AdapterRow, Finding, FleetReport, ReplicaView, TenantView

NUM_ADAPTERS = 10
NUM_TENANTS = 8
UNKNOWN = "-"
STYLES = {"bad": "bold red", "warn": "yellow", "info": "cyan"}
USES = {"pinned": "█", "resident": "▒", "loading": "↓", "free": "·"}

Sleep = Callable[[float], None]


def run_top(client: ControlClient, output: Output, *, interval_s: float, once: bool, sleep: Sleep = time.sleep) -> None:
    """Draw frames until interrupted, in place on a terminal; with `once`, one frame."""
    frames = _frames(client, interval_s, sleep)
    if output.as_json or once or not output.out.is_terminal:
        for report in frames:
            _print(report, output)
            if once:
                return
    with Live(console=output.out, auto_refresh=False, screen=True) as live:
        for report in frames:
            live.update(_screen(report, output.out.size.height), refresh=True)


def _frames(client: ControlClient, interval_s: float, sleep: Sleep) -> Iterator[FleetReport]:
    """A report each interval; the gateway has rates from the first one on."""
    while True:
        report = client.fleet(num_adapters=NUM_ADAPTERS, since_s=time.time())
        yield report
        sleep(max(interval_s, report.period_s))


def _screen(report: FleetReport, height: int) -> Group:
    """What fits: the last tables give way."""
    parts: list[Text | Table] = [Text(title(report), style="bold"), *_finding_lines(report)]
    left = height - len(parts)
    for grid in frame_grids(report):
        rows = [tuple(map(one_line, row)) for row in grid.rows][: max(0, left - 2)]
        if rows:
            parts += [Text(""), rich_table(Grid(grid.headers, rows, right=grid.right))]
            left -= len(rows) + 2
    return Group(*parts)


def _finding_lines(report: FleetReport) -> list[Text]:
    return [Text(one_line(finding_text(found)), style=STYLES[found.severity]) for found in report.findings]


def _print(report: FleetReport, output: Output) -> None:
    output.value(report.model_dump(mode="json"))
    output.line(title(report))
    for found in report.findings:
        output.line(one_line(finding_text(found)), style=STYLES[found.severity])
    for grid in frame_grids(report):
        output.grid(grid)


def title(report: FleetReport) -> str:
    totals, at = report.totals, time.strftime("%H:%M:%S", time.localtime(report.at_s))
    figures = (
        count(len(report.replicas), "replica"),
        f"{totals.tokens_per_s:.0f} tokens/s",
        f"{totals.requests_per_s:.1f} calls/s",
        f"{totals.waiting} waiting",
        f"{totals.swaps_per_s:.2f} swaps/s",
        f"{_percent(totals.hit_rate)} hits",
    )
    return f"{at}  {', '.join(figures)}"


def finding_text(found: Finding) -> str:
    return f"! {found.text}"


def frame_grids(report: FleetReport) -> tuple[Grid, ...]:
    """The tables; those that would be empty are left out."""
    grids = (_replicas(report.replicas), _tenants(report.tenants), _adapters(report.adapters.rows))
    return tuple(grid for grid in grids if grid.rows)


def _replicas(replicas: tuple[ReplicaView, ...]) -> Grid:
    headers = ("RING", "REPLICA", "SLOTS", "TAKEN", "STAGED", "RUNNING", "WAITING", "KV", "TOKENS/S", "SWAPS/S", "HITS")
    rows = [_replica_row(replica) for replica in replicas]
    return Grid(headers, rows, right=frozenset(headers) - {"REPLICA", "SLOTS"})


def _replica_row(replica: ReplicaView) -> tuple[str, ...]:
    taken = sum(slot.use != "free" for slot in replica.slots)
    about = (str(replica.ring_id), replica.replica_id, "".join(USES[slot.use] for slot in replica.slots))
    holds = (f"{taken}/{replica.num_slots}", str(replica.num_staged))
    if not replica.answers:
        return (*about, *holds, *(UNKNOWN,) * 6)
    return (
        *about,
        *holds,
        str(replica.running),
        str(replica.waiting),
        _percent(replica.kv_used),
        f"{replica.tokens_per_s:.0f}",
        f"{replica.swaps_per_s:.2f}",
        _percent(replica.hit_rate),
    )


def _tenants(tenants: tuple[TenantView, ...]) -> Grid:
    headers = ("TENANT", "WAITING", "QUEUE", "SERVICE", "CALLS/S", "FIRST P99", "OLDEST")
    rows = [
        (
            one.tenant,
            str(one.waiting),
            _percent(one.queue_share),
            _percent(one.service_share),
            f"{one.requests_per_s:.1f}",
            _seconds(one.first_token_p99_s),
            _seconds(one.oldest_wait_s if one.waiting else None),
        )
        for one in tenants[:NUM_TENANTS]
    ]
    return Grid(headers, rows, right=frozenset(headers) - {"TENANT"})


def _adapters(adapters: tuple[AdapterRow, ...]) -> Grid:
    headers = ("ADAPTER", "SLOTS", "CALLS", "CALLS/S", "TOKENS/S", "FIRST P50", "FIRST P99")
    rows = [
        (
            one.name if one.live is None else f"{one.name}@{one.live}",
            str(one.num_slots),
            f"{one.requests:.0f}",
            f"{one.requests_per_s:.1f}",
            f"{one.tokens_per_s:.0f}",
            _seconds(one.first_token_p50_s),
            _seconds(one.first_token_p99_s),
        )
        for one in adapters
    ]
    return Grid(headers, rows, right=frozenset(headers) - {"ADAPTER"})


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
