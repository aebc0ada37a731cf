"""The change log as a chain: every entry's hash covers the entry and the hash before it. Knows no database.

Who changes, removes or reorders entries must make every later hash anew; who keeps the latest (revision, hash) pair
somewhere else notices even that.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from registry.digest import canonical_json
from registry.errors import AuditBroken
from registry.types import AuditEntry, Event

GENESIS = "0" * 64
"""Stands before the first entry."""


class Head(NamedTuple):
    """The last entry of a chain, and all that is needed to go on from it."""

    revision: int = 0
    hash: str = GENESIS


def entry_hash(previous: str, event: Event) -> str:
    """sha256 over the canonical JSON of the event's own fields and the hash of the entry before it."""
    fields = event.model_dump(mode="json", include=set(Event.model_fields))
    return hashlib.sha256(canonical_json({**fields, "previous_hash": previous})).hexdigest()


def check_chain(entries: Iterable[AuditEntry], head: Head = Head()) -> Head:  # noqa: B008 (immutable)
    """The head after `entries`, which must follow `head`. Raises AuditBroken at the first one that does not."""
    for entry in entries:
        if entry.revision != head.revision + 1:
            raise AuditBroken(f"entry {head.revision + 1} of the audit log is missing: entry {entry.revision} follows")
        if entry.previous_hash != head.hash or entry_hash(head.hash, entry) != entry.hash:
            raise AuditBroken(f"entry {entry.revision} of the audit log does not match its hash: it was changed")
        head = Head(entry.revision, entry.hash)
    return head


def check_head(found: Head, wanted: Head) -> None:
    """Raises AuditBroken when the chain does not end where it should."""
    if found != wanted:
        raise AuditBroken(
            f"the audit log ends at entry {found.revision} ({found.hash[:12]}),"
            f" it should end at {wanted.revision} ({wanted.hash[:12]})"
        )
