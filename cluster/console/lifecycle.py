"""Commands for a version's later life: canary, promote, halt, quarantine, unalias, where, gc and audit."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from cluster.console import push as pushing
from cluster.console.client import ControlClient
from cluster.console.errors import Refused, WrongUsage
from cluster.console.options import (
    AliasOption,
    NameArgument,
    NoWaitOption,
    RefArgument,
    TimeoutOption,
    VersionArgument,
)
from cluster.console.ref import AdapterRef, check_name, find_version, parse_ref
from cluster.console.render import Grid, human_bytes, one_line
from cluster.console.session import Session
from cluster.console.views import event_line
from registry.audit import Head, check_chain, check_head
from registry.errors import AuditBroken
from registry.types import LIVE_ALIAS, AuditEntry, CollectReport, VersionStates

AUDIT_PAGE = 1000
HOLD_S = 10.0


def canary(
    session: Session,
    ref: VersionArgument,
    weight: Annotated[float, typer.Option("--weight", min=0, max=1, help="Share of the alias's keys, 0.1 for 10 %.")],
    alias: AliasOption = LIVE_ALIAS,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0,
) -> None:
    """Send a share of an alias's requests to another version."""
    wanted = with_number(session, ref)
    started = session.client.canary(wanted.name, wanted.number or 0, weight, alias)
    pushing.finish(session, started, wait=not no_wait, timeout_s=timeout)


def promote(
    session: Session,
    name: NameArgument,
    alias: AliasOption = LIVE_ALIAS,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 300.0,
) -> None:
    """Point an alias at its canary."""
    started = session.client.promote(check_name(name), alias)
    pushing.finish(session, started, wait=not no_wait, timeout_s=timeout)


def halt(session: Session, name: NameArgument, alias: AliasOption = LIVE_ALIAS) -> None:
    """End the canary of an alias; every request goes where the alias points."""
    record = session.client.halt(check_name(name), alias)
    session.output.value(record.model_dump(mode="json"))
    session.output.line(f"{name}@{alias} is version {record.aliases[alias]} for everybody")


def quarantine(
    session: Session,
    ref: VersionArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; it goes into the audit log.")],
) -> None:
    """Stop serving a version's content everywhere, at once; what runs on it is aborted."""
    wanted = with_number(session, ref)
    record = session.client.quarantine(wanted.name, wanted.number or 0, reason)
    session.output.value(record.model_dump(mode="json"))
    session.output.line(f"{wanted.name}@{wanted.number} is quarantined")


def unalias(session: Session, ref: RefArgument) -> None:
    """Remove an alias, as in `lorafleet unalias legal@beta`."""
    wanted = parse_ref(ref)
    if wanted.selector is None or wanted.number is not None:
        raise WrongUsage(f"say which alias: {wanted.name}@ALIAS")
    record = session.client.remove_alias(wanted.name, wanted.selector)
    session.output.value(record.model_dump(mode="json"))
    session.output.line(f"{wanted} is gone")


def where(
    session: Session,
    ref: VersionArgument,
    follow: Annotated[bool, typer.Option("--follow", help="Go on, and print every change.")] = False,
) -> None:
    """Show what every replica has of a version."""
    wanted = with_number(session, ref)
    with suppress(KeyboardInterrupt):
        etag: str | None = None
        while etag is None or follow:
            states = session.client.version_states(wanted.name, wanted.number or 0, etag, HOLD_S if etag else 0.0)
            if states.etag != etag:
                session.output.value(states.model_dump(mode="json"), compact=follow)
                session.output.grid(states_grid(states))
            etag = states.etag


def gc(
    session: Session,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and why; change nothing.")] = False,
) -> None:
    """Collect versions beyond the retention rules, and bytes that nobody needs."""
    report = session.client.collect(dry_run=dry_run)
    session.output.value(report.model_dump(mode="json"))
    session.output.grid(collect_grid(report))
    would = "would free" if dry_run else "freed"
    session.output.line(f"{would} {human_bytes(report.freed_bytes)}")


def audit(
    session: Session,
    verify: Annotated[bool, typer.Option("--verify", help="Check every entry against the chain of hashes.")] = False,
    after: Annotated[int, typer.Option("--after", min=0, help="Only entries after this revision.")] = 0,
    anchor: Annotated[
        str | None, typer.Option("--anchor", metavar="REVISION:HASH", help="A pair that an earlier check printed.")
    ] = None,
) -> None:
    """Show the audit log, or check that nobody has changed it."""
    if verify:
        _verify(session, None if anchor is None else parse_anchor(anchor))
        return
    while page := session.client.audit(after, AUDIT_PAGE).entries:
        for entry in page:
            session.output.value(entry.model_dump(mode="json"), compact=True)
            session.output.line(one_line(f"{entry.hash[:12]}  {event_line(entry)}"))
        after = page[-1].revision


COMMANDS: dict[str, Callable[..., None]] = {
    "canary": canary,
    "promote": promote,
    "halt": halt,
    "quarantine": quarantine,
    "unalias": unalias,
    "where": where,
    "gc": gc,
    "audit": audit,
}


def with_number(session: Session, ref: str) -> AdapterRef:
    """The version that `ref` names, by its number. Raises WrongUsage for a bare name."""
    wanted = parse_ref(ref)
    if wanted.selector is None:
        raise WrongUsage(f"say which version: {wanted.name}@N")
    number = wanted.number or find_version(session.client.adapter(wanted.name), wanted).number
    return AdapterRef(wanted.name, str(number))


def parse_anchor(text: str) -> Head:
    revision, colon, digest = text.partition(":")
    if not (colon and revision.isdecimal() and len(digest) == 64):
        raise WrongUsage(f"--anchor {text!r} is not REVISION:HASH")
    return Head(int(revision), digest)


def _verify(session: Session, anchor: Head | None) -> None:
    """Walk the chain from its first entry; with an anchor, it must also pass through that pair."""
    started_s = time.monotonic()
    try:
        head = _walk(session.client, anchor)
    except AuditBroken as error:
        raise Refused(error.message, code=error.code, hint="compare with a backup; do not trust this log") from None
    session.output.value({"verified": True, "revision": head.revision, "hash": head.hash})
    took_s = time.monotonic() - started_s
    session.output.line(f"{head.revision} entries match their hashes ({took_s:.1f} s)", style="bold green")
    session.output.line(f"keep this elsewhere, for a later --anchor: {head.revision}:{head.hash}")


def _walk(client: ControlClient, anchor: Head | None) -> Head:
    """Raises AuditBroken."""
    head, wanted = Head(), Head()
    while True:
        page = client.audit(head.revision, AUDIT_PAGE)
        wanted = Head(page.head_revision, page.head_hash)
        if not page.entries:
            break
        head = check_chain(page.entries, head)
        if anchor is not None:
            _check_anchor(page.entries, anchor)
    check_head(head, wanted)
    if anchor is not None and anchor.revision > head.revision:
        raise AuditBroken(f"the audit log ends at entry {head.revision}, before the anchor {anchor.revision}")
    return head


def _check_anchor(entries: tuple[AuditEntry, ...], anchor: Head) -> None:
    for entry in entries:
        if entry.revision == anchor.revision:
            check_head(Head(entry.revision, entry.hash), anchor)


def states_grid(states: VersionStates) -> Grid:
    headers = ("RING", "REPLICA", "STATE", "RUNNING", "UP TO DATE", "TROUBLE")
    rows = [
        (
            str(state.ring_id),
            state.replica_id,
            state.state.value,
            "yes" if state.is_running else "no",
            "yes" if state.has_seen else "no",
            one_line(state.error or state.drained or ""),
        )
        for state in states.replicas
    ]
    title = f"version {states.version.number}: {states.version.state.value}"
    return Grid(headers, rows, title=title, right=frozenset({"RING"}))


def collect_grid(report: CollectReport) -> Grid:
    rows = [
        (
            item.action.value,
            f"{item.name}@{item.number}" if item.name else (item.blob_sha256 or "")[:12],
            human_bytes(item.num_bytes),
            item.why,
        )
        for item in report.items
    ]
    return Grid(("ACTION", "WHAT", "SIZE", "WHY"), rows, right=frozenset({"SIZE"}))
