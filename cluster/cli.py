"""The `lorafleet` command: one function a subcommand, over HTTP only. Imports no Ray, no torch and no transformers."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, cast

import typer

from cluster.console import lifecycle, plan, residence, tenants, usage, vault, views
from cluster.console import push as pushing
from cluster.console.doctor import Verdict, examine
from cluster.console.errors import Refused, WrongUsage
from cluster.console.follow import wait_ready
from cluster.console.options import (
    AliasOption,
    IntervalOption,
    NameArgument,
    NoWaitOption,
    OnceOption,
    RefArgument,
    TimeoutOption,
    VersionArgument,
    YesOption,
)
from cluster.console.ref import AdapterRef, check_name, find_version, parse_ref
from cluster.console.render import Grid, Output, one_line
from cluster.console.session import (
    DEFAULT_URL,
    INTERRUPTED_STATUS,
    KEY_VARIABLE,
    URL_VARIABLE,
    Session,
    Settings,
    command,
)
from cluster.console.template import show_template
from cluster.console.top import run_top
from cluster.console.watch import run_watch
from registry.types import LIVE_ALIAS

UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])
"""Some releases of Typer carry click inside them, so the class is reached through one that Typer exports."""

app = typer.Typer(
    name="lorafleet",
    help="Serve many LoRA fine-tunes from one base model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def settings(
    ctx: typer.Context,
    url: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="The gateway.")] = DEFAULT_URL,
    key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="API key.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")] = False,
) -> None:
    """Serve many LoRA fine-tunes from one base model."""
    ctx.obj = Settings(url, key, as_json)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
@command
def push(
    session: Session,
    name: NameArgument,
    where: Annotated[
        str, typer.Argument(metavar="DIR|ARCHIVE|URL", help="What PEFT's save_pretrained wrote, or a server's source.")
    ],
    revision: Annotated[str | None, typer.Option("--revision", help="Commit of a hub source (hf://...).")] = None,
    no_activate: Annotated[bool, typer.Option("--no-activate", help="Store it; leave `live` as it is.")] = False,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0,
) -> None:
    """Upload an adapter and make it live on every replica."""
    pushing.push(session, name, where, revision=revision, activate=not no_activate, wait=not no_wait, timeout_s=timeout)


@app.command()
@command
def template(session: Session) -> None:
    """Print a training script, with its LoraConfig, whose adapters fit this fleet."""
    show_template(session)


@app.command("ls")
@command
def list_adapters(session: Session) -> None:
    """List the adapters."""
    adapters = session.client.adapters()
    session.output.value([adapter.model_dump(mode="json") for adapter in adapters])
    session.output.grid(views.adapters_grid(adapters))


@app.command()
@command
def show(session: Session, ref: RefArgument) -> None:
    """Show an adapter's versions, or one version in full."""
    wanted = parse_ref(ref)
    adapter = session.client.adapter(wanted.name)
    if wanted.selector is None:
        session.output.value(adapter.model_dump(mode="json"))
        session.output.grid(views.versions_grid(adapter, session.client.replicas()))
        return
    detail = session.client.version(wanted.name, find_version(adapter, wanted).number)
    session.output.value(detail.model_dump(mode="json"))
    for line in views.version_lines(wanted.name, detail):
        session.output.line(line)


@app.command()
@command
def activate(
    session: Session,
    ref: VersionArgument,
    alias: AliasOption = LIVE_ALIAS,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0,
) -> None:
    """Point an alias at a version, once every replica has it."""
    wanted = parse_ref(ref)
    if wanted.selector is None:
        raise WrongUsage(f"say which version: {wanted.name}@N")
    started = session.client.set_alias(wanted.name, alias, _number(session, wanted))
    pushing.finish(session, started, wait=not no_wait, timeout_s=timeout)


@app.command()
@command
def rollback(
    session: Session,
    name: NameArgument,
    alias: AliasOption = LIVE_ALIAS,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0,
) -> None:
    """Point an alias back at the version it had before."""
    started = session.client.rollback(check_name(name), alias)
    pushing.finish(session, started, wait=not no_wait, timeout_s=timeout)


@app.command()
@command
def retire(
    session: Session,
    ref: RefArgument,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Seconds that running requests may still take.")
    ] = None,
    yes: YesOption = False,
) -> None:
    """Take an adapter, or one version of it, out of service; what runs may end before the deadline."""
    wanted = parse_ref(ref)
    if wanted.selector is not None and wanted.number is None:
        raise WrongUsage(f"retire a version by its number: {wanted.name}@N")
    if not yes:
        _confirm(f"retire {wanted}? Requests for it will be refused")
    session.client.retire(wanted.name, wanted.number, deadline)
    session.output.value({"name": wanted.name, "number": wanted.number, "retired": True})
    session.output.line(f"{wanted} is retired")


@app.command()
@command
def replicas(session: Session) -> None:
    """List the replicas and what they hold."""
    found = session.client.replicas()
    session.output.value([replica.model_dump(mode="json") for replica in found])
    session.output.grid(views.replicas_grid(found))
    for replica in found:
        for digest, why in replica.failed.items():
            session.output.note(one_line(f"{replica.replica_id} cannot stage {digest[: views.DIGEST_CHARS]}: {why}"))


@app.command()
@command
def top(session: Session, interval: IntervalOption = 1.0, once: OnceOption = False) -> None:
    """Watch slots, queues, swap rate, hit rate and tokens a second."""
    with suppress(KeyboardInterrupt):
        run_top(session.client, session.output, interval_s=interval, once=once)


@app.command()
@command
def watch(
    session: Session,
    after: Annotated[int, typer.Option("--after", min=0, help="Only changes after this revision.")] = 0,
    once: OnceOption = False,
) -> None:
    """Follow the change log."""
    with suppress(KeyboardInterrupt):
        run_watch(session.client, session.output, after=after, once=once)


@app.command()
@command
def doctor(session: Session) -> None:
    """Find out what is wrong."""
    findings = examine(session.client, has_key=session.has_key)
    session.output.value([finding.as_json() for finding in findings])
    rows = [(finding.verdict.value, finding.question, one_line(finding.detail)) for finding in findings]
    session.output.grid(Grid(("", "CHECK", "FOUND"), rows))
    for finding in findings:
        if finding.hint:
            session.output.note(f"{finding.question}: {finding.hint}")
    failed = [finding.question for finding in findings if finding.verdict is Verdict.FAILED]
    if failed:
        raise typer.Exit(1)


@app.command("wait-ready")
@command
def wait_until_ready(session: Session, timeout: TimeoutOption = 300.0) -> None:
    """Wait until the fleet serves, then say what to do next."""
    started_s = time.monotonic()
    with session.output.waiting() as show_wait:
        body = wait_ready(session.client, show_wait, timeout_s=timeout)
    took_s = time.monotonic() - started_s
    session.output.value({"ready": True, "waited_s": round(took_s, 3), "detail": body})
    session.output.line(f"the fleet is ready at {session.client.url} ({took_s:.1f} s)", style="bold green")
    if not session.output.as_json:
        for line in views.next_steps(session.client.url, session.client.base_name(), has_key=session.has_key):
            session.output.line(line)


for name, function in {
    **lifecycle.COMMANDS,
    **vault.COMMANDS,
    **plan.COMMANDS,
    **tenants.COMMANDS,
    **usage.COMMANDS,
    **residence.COMMANDS,
}.items():
    app.command(name)(command(function))
for group, help_text, commands in tenants.GROUPS:
    subcommands = typer.Typer(help=help_text, no_args_is_help=True)
    for name, function in commands.items():
        subcommands.command(name)(command(function))
    app.add_typer(subcommands, name=group)


def _number(session: Session, ref: AdapterRef) -> int:
    """The version's number; an alias is looked up."""
    return ref.number or find_version(session.client.adapter(ref.name), ref).number


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise WrongUsage(f"{question}: nobody is here to answer", hint="add --yes")
    if not typer.confirm(question, err=True):
        raise Refused("nothing was done", code="declined")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0, 1 refused, 2 wrong usage, 3 no server, 130 interrupted."""
    given = None if arguments is None else list(arguments)
    try:
        return int(app(args=given, prog_name="lorafleet", standalone_mode=False) or 0)
    except UsageError as error:
        message = getattr(error, "format_message", error.__str__)()
        Output().failure(WrongUsage(message, hint="see lorafleet --help"))
    except typer.Abort:
        return INTERRUPTED_STATUS
    return WrongUsage.exit_status


if __name__ == "__main__":
    sys.exit(main())
