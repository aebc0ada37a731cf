"""Commands that keep adapters at hand: pin, unpin and preload."""

from collections.abc import Callable
from typing import Annotated

import typer
from pydantic import ValidationError

from cluster.console.errors import WrongUsage
from cluster.console.options import NameArgument
from cluster.console.ref import check_name
from cluster.console.session import Session
from registry.types import LEAST_PRELOAD_S, MOST_PRELOAD_S, AdapterRecord, Preload


def pin(session: Session, name: NameArgument) -> None:
    """Keep the live version of an adapter in a slot of every replica."""
    _tell(session, session.client.pin(check_name(name)))


def unpin(session: Session, name: NameArgument) -> None:
    """Let an adapter leave its slots when others need them."""
    _tell(session, session.client.unpin(check_name(name)))


def preload(
    session: Session,
    name: NameArgument,
    every: Annotated[float | None, typer.Option("--every", metavar="SECONDS", help="So often.")] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="HH:MM", help="Each day at that time of UTC.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Not any more.")] = False,
) -> None:
    """Show, or say, when an adapter is brought to its homes ahead of its requests."""
    if sum((every is not None, at is not None, off)) > 1:
        raise WrongUsage("give one of --every, --at and --off")
    if every is None and at is None and not off:
        _tell(session, session.client.adapter(check_name(name)))
        return
    _tell(session, session.client.set_preload(check_name(name), None if off else _schedule(every, at)))


def _schedule(every: float | None, at: str | None) -> Preload:
    try:
        return Preload(every_s=every, at=at)
    except ValidationError:
        bounds = f"{LEAST_PRELOAD_S} to {MOST_PRELOAD_S}"
        wrong = f"--every {every:g} is not from {bounds}" if at is None else f"--at {at!r} is no HH:MM"
        raise WrongUsage(wrong) from None


def _tell(session: Session, record: AdapterRecord) -> None:
    schedule = record.preload
    session.output.value(
        {
            "name": record.name,
            "pinned": record.pinned,
            "preload": None if schedule is None else schedule.model_dump(exclude_none=True),
        }
    )
    session.output.line(f"{record.name} is {'pinned' if record.pinned else 'not pinned'}; {_when(schedule)}")


def _when(preload: Preload | None) -> str:
    if preload is None:
        return "no preload"
    return f"preload every {preload.every_s:g} s" if preload.at is None else f"preload each day at {preload.at} UTC"


COMMANDS: dict[str, Callable[..., None]] = {"pin": pin, "unpin": unpin, "preload": preload}
