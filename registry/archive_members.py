"""What readers of archives have in common: a member, and the error for an archive that is not sound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


class ArchiveError(ValueError):
    """The bytes are no archive of the kind, or use a feature that is not read."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `refusal` says why it is no plain file (a link, a device), None when it is one or a folder.

    `chunks(size)` yields its bytes in pieces of at most `size` and may raise ArchiveError; it is called at most once,
    before the next member is asked for.
    """

    name: str
    is_folder: bool
    refusal: str | None
    chunks: Callable[[int], Iterator[bytes]]
