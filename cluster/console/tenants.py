"""`lorafleet tenant`, `lorafleet key` and `lorafleet callers`: who may do what, and how much of it."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from cluster.console.errors import Refused, WrongUsage
from cluster.console.options import NameArgument, YesOption
from cluster.console.ref import check_name
from cluster.console.render import Grid, human_bytes
from cluster.console.session import Session
from cluster.console.vault import DatabaseOption, DataOption, open_registry
from registry.types import EVERYBODY, KeyRecord, NewKey, Scope, TenantRecord, is_key_id

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY_ID", help="The 12 digits in the middle of the key.")]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires-in", metavar="TIME", help="As in 90d, 12h, 30m; never if omitted.")
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=VALUE", help="A limit, or NAME= for the configuration's default."),
]
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
KNOWN_LIMITS = (
    "max_concurrent",
    "requests_per_minute",
    "tokens_per_minute",
    "max_adapters",
    "max_stored_bytes",
    "max_slots",
    "weight",
)


def tenant_add(session: Session, name: TenantArgument, limit: LimitOption = None) -> None:
    """Add a tenant."""
    given = {key: value for key, value in limits_of(limit).items() if value is not None}
    _show_tenant(session, session.client.add_tenant(check_name(name), given))


def tenant_ls(session: Session) -> None:
    """List the tenants with what they have and what they may."""
    found = session.client.tenants()
    session.output.value([tenant.model_dump(mode="json") for tenant in found])
    session.output.grid(tenants_grid(found))


def tenant_set(session: Session, name: TenantArgument, limit: LimitOption = None) -> None:
    """Change a tenant's limits."""
    changes = limits_of(limit)
    if not changes:
        raise WrongUsage("say which limit: --limit tokens_per_minute=10000")
    _show_tenant(session, session.client.set_tenant(check_name(name), changes))


def tenant_rm(session: Session, name: TenantArgument, yes: YesOption = False) -> None:
    """Remove a tenant: its keys are revoked at once."""
    if not yes:
        raise WrongUsage(f"this revokes every key of {name}", hint="add --yes")
    session.client.remove_tenant(check_name(name))
    session.output.value({"name": name, "removed": True})
    session.output.line(f"{name} is removed and its keys are revoked")


def key_new(
    session: Session,
    tenant: TenantArgument,
    scope: Annotated[
        list[Scope] | None, typer.Option("--scope", help="What it allows; may be given several times.")
    ] = None,
    expires_in: ExpiresOption = None,
    note: Annotated[str, typer.Option("--note", help="What it is for.")] = "",
) -> None:
    """Make an API key. It is shown once."""
    scopes = scope or [Scope.INFER]
    _show_key(session, session.client.new_key(check_name(tenant), scopes, seconds_of(expires_in), note))


def key_ls(
    session: Session,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")] = None,
) -> None:
    """List the keys, without their secrets."""
    found = session.client.keys(tenant)
    session.output.value([key.model_dump(mode="json") for key in found])
    session.output.grid(keys_grid(found))


def key_rotate(
    session: Session,
    key_id: KeyArgument,
    overlap: Annotated[str, typer.Option("--overlap", metavar="TIME", help="How long the old key goes on.")] = "1d",
    expires_in: ExpiresOption = None,
) -> None:
    """Make a successor of a key; the old one goes on for a while."""
    made = session.client.rotate_key(check_key_id(key_id), seconds_of(overlap) or 0.0, seconds_of(expires_in))
    _show_key(session, made)


def key_revoke(session: Session, key_id: KeyArgument) -> None:
    """Refuse a key from now on, in every gateway within seconds."""
    revoked = session.client.revoke_key(check_key_id(key_id))
    session.output.value(revoked.model_dump(mode="json"))
    session.output.line(f"{revoked.key_id} of {revoked.tenant} is revoked")


def key_bootstrap(
    session: Session,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose; made if there is none.")] = "admin",
    data_dir: DataOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Make an admin's key in the registry's database, not over HTTP: the first one, or when all are lost."""
    from registry.errors import RegistryError

    registry = open_registry(data_dir, database_url, None, must_exist=True)
    try:
        made = registry.tenants.first_key(check_name(tenant), note="bootstrap")
    except RegistryError as error:
        raise Refused(error.message, code=error.code) from None
    finally:
        registry.close()
    _show_key(session, made)


def callers(
    session: Session,
    name: NameArgument,
    tenants: Annotated[list[str] | None, typer.Argument(metavar="TENANT...", help="Who may call it.")] = None,
    everybody: Annotated[bool, typer.Option("--everybody", help="Every tenant.")] = False,
    nobody: Annotated[bool, typer.Option("--nobody", help="Its owner alone.")] = False,
) -> None:
    """Show, or say, which tenants may call an adapter besides its owner."""
    if sum((bool(tenants), everybody, nobody)) > 1:
        raise WrongUsage("give tenants, or --everybody, or --nobody")
    if tenants or everybody or nobody:
        access = session.client.set_callers(check_name(name), [EVERYBODY] if everybody else tenants or [])
        owner, allowed = access.owner, access.callers
    else:
        adapter = session.client.adapter(check_name(name))
        owner, allowed = adapter.owner, adapter.callers
    session.output.value({"name": name, "owner": owner, "callers": list(allowed)})
    listed = "everybody" if EVERYBODY in allowed else ", ".join((owner, *allowed))
    session.output.line(f"{name} may be called by {listed}")


TENANT_COMMANDS: dict[str, Callable[..., None]] = {
    "add": tenant_add,
    "ls": tenant_ls,
    "set": tenant_set,
    "rm": tenant_rm,
}
KEY_COMMANDS: dict[str, Callable[..., None]] = {
    "new": key_new,
    "ls": key_ls,
    "rotate": key_rotate,
    "revoke": key_revoke,
    "bootstrap": key_bootstrap,
}


COMMANDS: dict[str, Callable[..., None]] = {"callers": callers}
GROUPS = (
    ("tenant", "Add, change and remove tenants and their limits.", TENANT_COMMANDS),
    ("key", "Make, rotate and revoke API keys.", KEY_COMMANDS),
)


def limits_of(pairs: list[str] | None) -> dict[str, Any]:
    """`["weight=2", "max_slots="]` as `{"weight": 2.0, "max_slots": None}`. Raises WrongUsage."""
    limits: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or name not in KNOWN_LIMITS:
            raise WrongUsage(f"--limit {pair!r}: NAME is one of {', '.join(KNOWN_LIMITS)}")
        try:
            limits[name] = None if not text else float(text) if name == "weight" else int(text)
        except ValueError:
            raise WrongUsage(f"--limit {pair!r}: {text!r} is no number") from None
    return limits


def seconds_of(text: str | None) -> float | None:
    """`90d` as seconds. Raises WrongUsage."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None:
        raise WrongUsage(f"{text!r} is no time: a number and s, m, h or d, as in 90d")
    return int(found[1]) * UNITS_S[found[2]]


def check_key_id(text: str) -> str:
    """Raises WrongUsage, without repeating what may be a secret."""
    if not is_key_id(text):
        raise WrongUsage("a key is named by its id: 12 digits of 0-9 a-f, the middle part of the key")
    return text


def tenants_grid(tenants: list[TenantRecord]) -> Grid:
    rows = [
        (
            tenant.name,
            str(tenant.num_adapters),
            human_bytes(tenant.stored_bytes),
            ", ".join(f"{name}={value}" for name, value in tenant.effective if value is not None),
        )
        for tenant in tenants
    ]
    return Grid(("TENANT", "ADAPTERS", "STORED", "LIMITS"), rows, right=frozenset({"ADAPTERS", "STORED"}))


def keys_grid(keys: list[KeyRecord]) -> Grid:
    rows = [
        (
            key.key_id,
            key.tenant,
            ", ".join(key.scopes),
            day_of(key.created_at_s),
            "revoked" if key.revoked_at_s else day_of(key.expires_at_s) or "never",
            day_of(key.used_at_s) or "never",
            key.note,
        )
        for key in keys
    ]
    return Grid(("KEY", "TENANT", "SCOPES", "MADE", "ENDS", "LAST USE", "NOTE"), rows)


def day_of(at_s: float | None) -> str:
    return "" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")


def _show_tenant(session: Session, tenant: TenantRecord) -> None:
    session.output.value(tenant.model_dump(mode="json"))
    session.output.grid(tenants_grid([tenant]))


def _show_key(session: Session, made: NewKey) -> None:
    session.output.value(made.model_dump(mode="json"))
    session.output.note(f"key {made.key.key_id} of {made.key.tenant} ({', '.join(made.key.scopes)}); shown only now:")
    session.output.line(made.secret)
