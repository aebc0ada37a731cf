"""Archives: what is taken out of them, and what is refused before it can do harm."""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from registry.archives import opened, unpack
from registry.config import RegistryConfig
from registry.errors import InvalidAdapter, LimitExceeded

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 20}
LIMITS = RegistryConfig(max_files=8, max_unpacked_bytes=200_000)


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(files: dict[str, bytes], mode: str = "w:gz", format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=format) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def taken(folder: Path, data: bytes, limits: RegistryConfig = LIMITS) -> dict[str, bytes]:
    (folder / "out").mkdir()
    (folder / "archive").write_bytes(data)
    return {name: path.read_bytes() for name, path in unpack(folder / "archive", folder / "out", limits).items()}


def codes(folder: Path, data: bytes) -> set[str]:
    with pytest.raises(InvalidAdapter) as caught:
        taken(folder, data)
    return {fault.code for fault in caught.value.faults}


PACKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "zip": zipped,
    "zip-stored": lambda files: zipped(files, zipfile.ZIP_STORED),
    "tar": lambda files: tarred(files, "w"),
    "tar-gz": tarred,
    "tar-gnu": lambda files: tarred(files, "w", tarfile.GNU_FORMAT),
    "tar-ustar": lambda files: tarred(files, "w", tarfile.USTAR_FORMAT),
}


@pytest.fixture(params=PACKERS, ids=str)
def pack(request: pytest.FixtureRequest) -> Callable[[dict[str, bytes]], bytes]:
    return PACKERS[request.param]


def test_files_come_out_as_they_went_in(pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path) -> None:
    assert taken(tmp_path, pack(FILES)) == FILES


@pytest.mark.parametrize("prefix", ["", "./", "name/", "./deep/name/", "ü" * 40 + "/", "p" * 90 + "/" + "q" * 90 + "/"])
def test_names_keep_their_folders(
    prefix: str, pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if len(prefix) > 100 and "ustar" in request.node.name:
        pytest.skip("names of ustar are short")
    files = {f"{prefix}{name}": data for name, data in FILES.items()}
    assert taken(tmp_path, pack(files)) == {name.removeprefix("./"): data for name, data in files.items()}


def test_what_means_nothing_is_counted_but_not_written(
    pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path
) -> None:
    more = {"optimizer.pt": b"\x80" * 5000, "README.md": b"hello"}
    assert taken(tmp_path, pack({**FILES, **more})) == FILES
    written = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    assert sum(written) == sum(map(len, FILES.values()))


def test_pickle_is_noticed_but_never_written(pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path) -> None:
    found = taken(tmp_path, pack({**FILES, "adapter_model.bin": b"\x80\x04."}))
    assert found["adapter_model.bin"] == b""


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "a//b", "a\\b", "x" * 600, "a/./b"])
def test_entry_that_is_no_plain_path_is_refused(
    name: str, pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path
) -> None:
    try:
        data = pack({**FILES, name: b"?"})
    except ValueError:
        pytest.skip("this kind cannot hold such a name")
    assert codes(tmp_path, data) == {"unsafe_path"}
    assert not (tmp_path / "x").exists()


def test_every_fault_of_an_archive_is_told_at_once(tmp_path: Path) -> None:
    link = tarfile.TarInfo("notes")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    buffer = io.BytesIO(tarred({**FILES, "../x": b"", "ADAPTER_CONFIG.json": b"{}"}, "w"))
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        archive.addfile(link)
    assert codes(tmp_path, buffer.getvalue()) == {"unsafe_path", "ambiguous_files", "not_a_file"}


def test_bytes_are_counted_while_they_stream(pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="200000 bytes"):
        taken(tmp_path, pack({**FILES, "zeros": bytes(300_000)}))


def test_entries_are_counted(pack: Callable[[dict[str, bytes]], bytes], tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="entries"):
        taken(tmp_path, pack({f"{i}.txt": b"" for i in range(9)}))


def test_directory_too_large_for_its_entries_is_refused_unread(tmp_path: Path) -> None:
    data = bytearray(zipped({f"{i}.txt": b"" for i in range(400)}))
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<2H", data, end + 8, 1, 1)
    with pytest.raises(LimitExceeded, match="directory"):
        taken(tmp_path, bytes(data))


def test_size_that_an_entry_claims_is_not_believed(tmp_path: Path) -> None:
    data = bytearray(zipped({"adapter_config.json": bytes(300_000)}))
    central = data.index(b"PK\x01\x02")
    struct.pack_into("<L", data, central + 24, 10)
    with pytest.raises((InvalidAdapter, LimitExceeded)):
        taken(tmp_path, bytes(data))


def test_entry_without_a_name_is_refused(tmp_path: Path) -> None:
    """zipfile cannot even say whether such an entry is a folder."""
    data = zipped({"x": b"?"}, zipfile.ZIP_STORED).replace(b"\x01\x00\x00\x00x?", b"\x00\x00\x00\x00?")
    central = data.index(b"PK\x01\x02")
    data = data[: central + 28] + b"\0\0" + data[central + 30 : central + 46] + data[central + 47 :]
    end = data.index(b"PK\x05\x06")
    data = data[: end + 12] + struct.pack("<2L", end - central, central) + data[end + 20 :]
    assert codes(tmp_path, data) == {"unsafe_path"}


def test_extended_header_has_a_limit(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "c" * 100_000}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(info)
    assert codes(tmp_path, buffer.getvalue()) == {"archive"}


def test_gzip_bomb_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(zeros) < 100_000
    # zeros are the end of a tar, so a header stands before them
    header = tarred({"zeros": b""}, "w")[:512]
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = bytearray(header)
    body[124:136] = b"00400000000\0"
    body[148:156] = b" " * 8
    body[148:156] = b"%06o\0 " % sum(body)
    data = packer.compress(bytes(body)) + b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    with pytest.raises(LimitExceeded):
        taken(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + bytes(60),
        b"\x1f\x8b" + bytes(60),
        b"BZh9" + bytes(60),
        b"7z\xbc\xaf\x27\x1c" + bytes(60),
        zipped(FILES)[:-30],
        tarred(FILES)[:-30],
        tarred(FILES) + b"more",
        tarred(FILES, "w")[:700],
        zipped(FILES, zipfile.ZIP_LZMA),
    ],
    ids=["zip", "gzip", "bzip2", "7z", "zip-cut", "gz-cut", "gz-more", "tar-cut", "lzma"],
)
def test_archive_that_cannot_be_read_is_refused(data: bytes, tmp_path: Path) -> None:
    assert codes(tmp_path, data) <= {"archive", "not_a_file"}


def test_upload_of_plain_files_passes_through(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(zipped(FILES))
    (tmp_path / "b").write_bytes(b"{}")
    files = {"one.zip": tmp_path / "a", "two.json": tmp_path / "b"}
    with opened(files, LIMITS) as found:
        assert found == files


def test_what_was_unpacked_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(zipped(FILES))
    with opened({"any name": tmp_path / "a"}, LIMITS) as found:
        paths = list(found.values())
        assert [path.is_file() for path in paths] == [True, True]
    assert not any(path.exists() for path in paths)


def test_file_that_only_is_called_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    with pytest.raises(InvalidAdapter, match="its format is not supported"), opened({"x.zip": tmp_path / "a"}, LIMITS):
        pass
