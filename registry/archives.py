"""Opens an upload that is one archive: zip, tar or tar.gz. Writes what an adapter consists of and counts the rest.

No member decides where anything is written: each goes to a numbered file of a fresh folder. Everything that is read is
counted while it streams, so an archive that promises little and holds much is stopped at the limit.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from registry.adapter_files import KEPT_FILES, PICKLE_FILE, is_plain_path, is_shard
from registry.archive_members import ArchiveError, Member
from registry.config import RegistryConfig
from registry.errors import LimitExceeded
from registry.faults import FaultList, shown
from registry.tar_stream import tar_members
from registry.zip_stream import zip_members

CHUNK_BYTES = 1024 * 1024
MAX_PATH_CHARS = 512
MAX_REASON_CHARS = 300
ZIP, GZIP, TAR = "zip", "gzip", "tar"
OTHER_ARCHIVES = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"(\xb5/\xfd": "zstandard",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
}
TAR_MAGIC_OFFSET = 257
_LEADING = re.compile(r"^(\./)+(?=.)")
"""`./` before a name, which tar writes when it is given a folder as `.`."""
SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")


@contextmanager
def opened(files: Mapping[str, Path], config: RegistryConfig) -> Iterator[Mapping[str, Path]]:
    """The upload's files (relative name -> file); those inside it when the upload is one archive, until the end.

    Raises InvalidAdapter with every fault of the archive, and LimitExceeded.
    """
    archive = _only_archive(files)
    if archive is None:
        yield files
        return
    with tempfile.TemporaryDirectory(prefix="lorafleet-archive-") as folder:
        yield unpack(archive, Path(folder), config)


def _only_archive(files: Mapping[str, Path]) -> Path | None:
    """The one file of the upload if its name or its first bytes say that it is an archive."""
    if len(files) != 1:
        return None
    ((name, path),) = files.items()
    is_file = path.is_file() and not path.is_symlink()
    return path if is_file and (name.lower().endswith(SUFFIXES) or _kind_of(path) is not None) else None


def _kind_of(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(TAR_MAGIC_OFFSET + 5)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ZIP
    if head.startswith(b"\x1f\x8b"):
        return GZIP
    if head[TAR_MAGIC_OFFSET:] == b"ustar":
        return TAR
    return next((kind for magic, kind in OTHER_ARCHIVES.items() if head.startswith(magic)), None)


def unpack(archive: Path, folder: Path, config: RegistryConfig) -> dict[str, Path]:
    """Write the members that matter into `folder` and return relative name -> file.

    Raises InvalidAdapter with every fault found, LimitExceeded at the first limit that is passed.
    """
    faults = FaultList()
    unpacking = _Unpacking(folder, config, faults)
    try:
        with archive.open("rb") as file:
            kind = _kind_of(archive)
            if kind == ZIP:
                unpacking.take_all(zip_members(file, config.max_files))
            elif kind in (GZIP, TAR):
                unpacking.take_all(tar_members(file, config.max_unpacked_bytes, gzipped=kind == GZIP))
            else:
                raise ArchiveError(f"{kind or 'its format'} is not supported; send zip, tar or tar.gz")
    except ArchiveError as error:
        hint = "make it with zip, tar or shutil.make_archive from the folder that save_pretrained wrote"
        faults.add("archive", f"the archive cannot be read: {str(error)[:MAX_REASON_CHARS]}", hint=hint)
    faults.raise_if_any()
    return unpacking.files


class _Unpacking:
    """Takes members one by one; keeps count of entries and bytes."""

    def __init__(self, folder: Path, config: RegistryConfig, faults: FaultList) -> None:
        self.files: dict[str, Path] = {}
        self._folder = folder
        self._config = config
        self._faults = faults
        self._seen: dict[str, str] = {}
        self._num_entries = 0
        self._num_bytes = 0

    def take_all(self, members: Iterator[Member]) -> None:
        for found in members:
            member = replace(found, name=_LEADING.sub("", found.name))
            self._num_entries += 1
            if self._num_entries > self._config.max_files:
                raise LimitExceeded(f"the archive has more than {self._config.max_files} entries, which is the limit")
            if self._is_sound(member) and not member.is_folder:
                self._take(member)

    def _is_sound(self, member: Member) -> bool:
        name = member.name.removesuffix("/") if member.is_folder else member.name
        if member.is_folder and name == ".":  # what `tar -C folder .` begins with
            return True
        if len(name) > MAX_PATH_CHARS or not is_plain_path(name):
            self._faults.add("unsafe_path", f"the archive's entry {shown(name)} is not a plain relative path")
            return False
        if member.refusal is not None:
            hint = "archive plain files only, such as with tar --dereference"
            self._faults.add("not_a_file", f"the archive's entry {shown(name)} is {member.refusal}", hint=hint)
            return False
        return member.is_folder or self._is_only_one(name)

    def _is_only_one(self, name: str) -> bool:
        twin = self._seen.setdefault(name.casefold(), name)
        if twin is name:
            return True
        what = "twice" if twin == name else f"and {shown(twin)}, which differs in case only"
        self._faults.add("ambiguous_files", f"the archive holds {shown(name)} {what}")
        return False

    def _take(self, member: Member) -> None:
        base_name = member.name.rpartition("/")[2]
        keep = base_name in KEPT_FILES or is_shard(base_name)
        path = self._folder / str(len(self.files))
        with path.open("wb") as target:
            for chunk in member.chunks(CHUNK_BYTES):
                self._count(len(chunk))
                if keep and base_name != PICKLE_FILE:
                    target.write(chunk)
        if keep:
            self.files[member.name] = path

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._config.max_unpacked_bytes:
            limit = self._config.max_unpacked_bytes
            raise LimitExceeded(f"the archive unpacks to more than {limit} bytes, which is the limit")
