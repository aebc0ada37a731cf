"""`lorafleet watch`: the change log as it grows. It outlives a restart of the server."""

import time
from collections.abc import Callable

from cluster.console.client import ControlClient
from cluster.console.errors import Unreachable
from cluster.console.render import Output, one_line
from cluster.console.views import event_line
from registry.types import Event

Sleep = Callable[[float], None]


def run_watch(
    client: ControlClient,
    output: Output,
    *,
    after: int,
    interval_s: float,
    once: bool,
    sleep: Sleep = time.sleep,
) -> None:
    """Print events after revision `after` until interrupted; with `once`, only those there are."""
    events = client.events(after)
    while True:
        for event in events:
            _print(event, output)
        after = max((event.revision for event in events), default=after)
        if not events:
            if once:
                return
            sleep(interval_s)
        events = _next(client, output, after, interval_s, sleep)


def _next(client: ControlClient, output: Output, after: int, interval_s: float, sleep: Sleep) -> list[Event]:
    told = False
    while True:
        try:
            return client.events(after)
        except Unreachable as error:
            if not told:
                output.note(f"{error.message}; trying again")
            told = True
            sleep(interval_s)


def _print(event: Event, output: Output) -> None:
    output.value(event.model_dump(mode="json"), compact=True)
    output.line(one_line(event_line(event)))
