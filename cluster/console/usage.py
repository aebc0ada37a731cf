"""`lorafleet usage`: what tenants used of which version, for charge-back."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from cluster.console.errors import WrongUsage
from cluster.console.render import Grid
from cluster.console.session import Session

TimeHelp = "A day or moment, as in 2026-11-30 or 2026-11-30T05:00:00Z."
NUMBERS = ("requests", "prompt_tokens", "output_tokens", "device_s")


def usage(
    session: Session,
    from_: Annotated[str | None, typer.Option("--from", metavar="TIME", help=f"{TimeHelp} All that is kept.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="TIME", help=f"{TimeHelp} Until now.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")] = None,
    group_by: Annotated[
        str, typer.Option("--group-by", metavar="GROUPS", help="Some of hour, day, tenant, adapter, version.")
    ] = "tenant,version",
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout and nothing else.")] = False,
) -> None:
    """Report requests, tokens and device seconds by tenant and version."""
    if as_csv and session.output.as_json:
        raise WrongUsage("take one of --csv and --json")
    asked = {"from": from_, "to": to, "tenant": tenant, "group_by": group_by}
    question = {name: text for name, text in asked.items() if text is not None}
    if as_csv:
        typer.echo(session.client.usage_csv(question), nl=False)
        return
    report = session.client.usage(question)
    session.output.value(report)
    session.output.grid(usage_grid(report["data"]))


COMMANDS: dict[str, Callable[..., None]] = {"usage": usage}


def usage_grid(rows: list[dict[str, Any]]) -> Grid:
    """The report's own columns; a digest is cut as elsewhere."""
    names = list(rows[0]) if rows else list(NUMBERS)
    headers = tuple(name.replace("_", " ").upper() for name in names)
    right = frozenset(header for name, header in zip(names, headers, strict=True) if name in (*NUMBERS, "version"))
    return Grid(headers, [tuple(_cell(name, row[name]) for name in names) for row in rows], right=right)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "base" if name == "adapter" else "-"
    return f"{value:.3f}" if name == "device_s" else str(value)[:12] if name == "digest" else str(value)
