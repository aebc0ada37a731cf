"""Which sources an upload may name: a strict grammar of URLs, and roots that the configuration allows.

A root is a folder (`/models` or `file:///models`), a bucket with or without a prefix (`s3://bucket/adapters`,
`gs://bucket`), or an owner or repository of the hub (`hf://acme`, `hf://acme/legal`). No host ever comes from a
request: buckets and repositories do, and only below a root.
"""

import posixpath
import re
from dataclasses import dataclass

SCHEMES = ("file", "s3", "gs", "hf")
FILE, HUB = "file", "hf"
_PLACE = re.compile(r"[A-Za-z0-9._=+@ -]+(/[A-Za-z0-9._=+@ -]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class BadUrl(ValueError):
    """The text is no source in this grammar."""


@dataclass(frozen=True, slots=True)
class Place:
    """A scheme and a path of plain parts; of `file` an absolute path, else `bucket/key` or `owner/repository`."""

    scheme: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def is_under(self, root: "Place") -> bool:
        """Whether this is `root` or below it, whole path parts compared."""
        return self.scheme == root.scheme and (self.path == root.path or self.path.startswith(f"{root.path}/"))


def parse_place(text: str) -> Place:
    """Raises BadUrl for anything but a plain path, or `scheme://` with plain parts and no `.` or `..` among them."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = FILE, text
    if scheme not in SCHEMES:
        raise BadUrl(f"its scheme is {scheme[:20]!r}; allowed: {', '.join(SCHEMES)}")
    relative = rest.rstrip("/")
    if scheme == FILE:
        if not rest.startswith("/"):
            raise BadUrl("a file's path must be absolute")
        relative = relative.removeprefix("/")
    if _PLACE.fullmatch(relative) is None or {".", ".."} & set(relative.split("/")):
        raise BadUrl("its path is not made of plain parts (letters, digits, . _ = + @ - and blanks)")
    return Place(scheme, f"/{relative}" if scheme == FILE else relative)


def check_root(text: str) -> str:
    """The root as it is kept. Raises ValueError."""
    try:
        place = parse_place(posixpath.expanduser(text))
    except BadUrl as error:
        raise ValueError(f"{text!r} is no root for sources: {error}") from error
    return place.path if place.scheme == FILE else str(place)


def is_commit(revision: str | None) -> bool:
    """Whether `revision` is a full commit hash, which no later push can move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None
