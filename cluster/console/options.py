"""Arguments and options that several commands of `lorafleet` share."""

from typing import Annotated

import typer

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
RefArgument = Annotated[str, typer.Argument(metavar="NAME[@N]", help="An adapter, or a version or alias of it.")]
VersionArgument = Annotated[str, typer.Argument(metavar="NAME@N", help="A version, or an alias such as legal@canary.")]
AliasOption = Annotated[str, typer.Option("--alias", help="The alias to move.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait.")]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return before the fleet has it.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
IntervalOption = Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between looks.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Look once and end.")]
