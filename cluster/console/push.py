"""`lorafleet push` and its kin: send an adapter, see an activation onto every replica, and say how to call it."""

from pathlib import Path

from cluster.console import views
from cluster.console.errors import WrongUsage
from cluster.console.folder import AdapterFolder, find_adapter, upload_parts
from cluster.console.follow import follow
from cluster.console.ref import check_name
from cluster.console.render import one_line
from cluster.console.session import Session
from registry.types import Activation, PushResult


def push(
    session: Session,
    name: str,
    where: str,
    *,
    revision: str | None = None,
    activate: bool,
    wait: bool,
    timeout_s: float,
) -> None:
    """Push a folder or an archive of this machine, or what the server finds at a URL.

    Raises Refused when the folder is unusable, the server refuses it, or a replica cannot stage it.
    """
    check_name(name)
    if "://" in where:
        result = session.client.push_source(name, where, revision=revision, activate=activate)
    elif revision is not None:
        raise WrongUsage("--revision belongs to a source of the hub: hf://owner/repository")
    else:
        result = _upload(session, name, find_adapter(Path(where)), activate)
    _report(session, result)
    if result.activation is not None and wait:
        result = result.model_copy(update={"activation": _see_through(session, result.activation, timeout_s)})
    session.output.value(result.model_dump(mode="json"))
    if result.activation is None:
        _say_not_activated(session, result)
    elif wait:
        _say_arrived(session, result.activation)


def finish(session: Session, activation: Activation, *, wait: bool, timeout_s: float) -> None:
    """See an activation of a known version through, if asked to, and report it."""
    if wait:
        activation = _see_through(session, activation, timeout_s)
    session.output.value(activation.model_dump(mode="json"))
    if wait:
        _say_arrived(session, activation)
    else:
        session.output.line(f"{activation.name}@{activation.number} will be {activation.alias}")


def _see_through(session: Session, activation: Activation, timeout_s: float) -> Activation:
    """Show what the activation waits for until the whole fleet has it."""
    with session.output.waiting() as show:
        return follow(session.client, activation, show, timeout_s=timeout_s)


def _say_arrived(session: Session, activation: Activation) -> None:
    session.output.line(views.arrival_line(activation, session.client.replicas()), style="bold green")
    _say_how_to_call(session, views.model_name(activation))


def _upload(session: Session, name: str, folder: AdapterFolder, activate: bool) -> PushResult:
    label = f"uploading {name}"
    with session.output.uploading(label, folder.num_bytes) as advance, upload_parts(folder, advance) as parts:
        return session.client.push(name, parts, activate=activate)


def _report(session: Session, result: PushResult) -> None:
    version = f"{result.name}@{result.version.number}"
    for warning in result.warnings:
        advice = f" ({warning.hint})" if warning.hint else ""
        session.output.note(one_line(f"warning: {warning.code}: {warning.message}{advice}"))
    if not result.created:
        session.output.note(f"{version} already holds this content")


def _say_not_activated(session: Session, result: PushResult) -> None:
    version = f"{result.name}@{result.version.number}"
    session.output.line(f"{version} is stored; make it live with: lorafleet activate {version}")
    _say_how_to_call(session, version)


def _say_how_to_call(session: Session, model: str) -> None:
    session.output.line("call it:")
    for line in views.curl_lines(session.client.url, model, has_key=session.has_key):
        session.output.line(f"  {line}")
