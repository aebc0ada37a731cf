"""`lorafleet backup` and `lorafleet restore`: they open the registry's database and blobs themselves, not over HTTP.

A backup may be taken while the registry runs. To restore, stop the fleet first.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.console.errors import Refused, WrongUsage
from cluster.console.render import human_bytes
from cluster.console.session import Session

if TYPE_CHECKING:
    from registry.service import Registry

DataOption = Annotated[
    Path | None, typer.Option("--data-dir", help="The registry's data_dir (or LORAFLEET_REGISTRY__DATA_DIR).")
]
DatabaseOption = Annotated[
    str | None, typer.Option("--database-url", help="The registry's database_url, if it has one.")
]
BlobsOption = Annotated[str | None, typer.Option("--blobs-url", help="The registry's blobs_url, if it has one.")]


def backup(
    session: Session,
    to: Annotated[
        str, typer.Argument(metavar="URL", help="A folder, or what fsspec understands (s3://bucket/prefix).")
    ],
    data_dir: DataOption = None,
    database_url: DatabaseOption = None,
    blobs_url: BlobsOption = None,
) -> None:
    """Copy the registry's rows and bytes to a folder or object store; it may run meanwhile."""
    from registry.errors import RegistryError

    registry = open_registry(data_dir, database_url, blobs_url, must_exist=True)
    try:
        name, snapshot = registry.backup(to)
    except RegistryError as error:
        raise Refused(error.message, code=error.code) from None
    finally:
        registry.close()
    facts = {"revision": snapshot.revision, "blobs": len(snapshot.blobs), "bytes": snapshot.num_bytes}
    session.output.value({"snapshot": name, "to": to, **facts, "audit_hash": snapshot.audit_hash})
    size = human_bytes(snapshot.num_bytes)
    session.output.line(f"{name} is in {to}: revision {snapshot.revision}, {len(snapshot.blobs)} blobs, {size}")


def restore(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="URL", help="Where a backup is.")],
    snapshot: Annotated[str | None, typer.Option("--snapshot", help="Which one; the newest if omitted.")] = None,
    data_dir: DataOption = None,
    database_url: DatabaseOption = None,
    blobs_url: BlobsOption = None,
) -> None:
    """Fill an empty registry from a backup. Stop the fleet first."""
    from registry.errors import RegistryError

    registry = open_registry(data_dir, database_url, blobs_url, must_exist=False)
    try:
        restored = registry.restore(source, snapshot)
    except RegistryError as error:
        raise Refused(error.message, code=error.code) from None
    finally:
        registry.close()
    facts = {"revision": restored.revision, "blobs": len(restored.blobs), "bytes": restored.num_bytes}
    session.output.value({"restored": True, **facts, "audit_hash": restored.audit_hash})
    session.output.line(f"restored revision {restored.revision} with {len(restored.blobs)} blobs, all checked")


COMMANDS: dict[str, Callable[..., None]] = {"backup": backup, "restore": restore}


def open_registry(
    data_dir: Path | None, database_url: str | None, blobs_url: str | None, *, must_exist: bool
) -> "Registry":
    """The registry that the options, and for what they leave out the environment, describe."""
    from cluster.config import ConfigError, load_registry
    from registry.errors import RegistryError
    from registry.service import Registry

    said = {"data_dir": data_dir, "database_url": database_url, "blobs_url": blobs_url}
    try:
        config = load_registry({})
        config = config.model_copy(update={name: value for name, value in said.items() if value is not None})
        file = config.data_dir.expanduser() / "registry.db"
        if must_exist and config.database_url is None and not file.exists():
            raise WrongUsage(f"there is no registry in {config.data_dir}", hint="pass --data-dir or --database-url")
        return Registry.open(config)
    except ConfigError as error:
        raise WrongUsage(str(error)) from None
    except RegistryError as error:
        raise Refused(error.message, code=error.code) from None
