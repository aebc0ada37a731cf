"""`lorafleet watch`: the change log as it grows. It outlives a restart of the server."""

import time
from collections.abc import Callable

from cluster.console.client import ControlClient
from cluster.console.errors import Unreachable
from cluster.console.render import Output, one_line
from cluster.console.views import event_line
from registry.types import Event

HOLD_S = 20.0
"""How long the server may hold one question for changes."""
PAUSE_S = 0.05
"""After an empty answer, should the server not hold questions."""
RETRY_S = 1.0

Sleep = Callable[[float], None]


def run_watch(
    client: ControlClient,
    output: Output,
    *,
    after: int,
    once: bool,
    sleep: Sleep = time.sleep,
) -> None:
    """Print events after revision `after` until interrupted; with `once`, only those there are."""
    events = client.events(after)
    while events or not once:
        for event in events:
            _print(event, output)
        if not events:
            sleep(PAUSE_S)
        after = max((event.revision for event in events), default=after)
        events = _next(client, output, after, 0.0 if once else HOLD_S, sleep)


def _next(client: ControlClient, output: Output, after: int, hold_s: float, sleep: Sleep) -> list[Event]:
    told = False
    while True:
        try:
            return client.events(after, wait_s=hold_s)
        except Unreachable as error:
            if not told:
                output.note(f"{error.message}; trying again")
            told = True
            sleep(RETRY_S)


def _print(event: Event, output: Output) -> None:
    output.value(event.model_dump(mode="json"), compact=True)
    output.line(one_line(event_line(event)))
