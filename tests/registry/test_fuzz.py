"""Damaged uploads: whatever the bytes, the answer is a manifest or a clean refusal, soon and within the limits.

Inputs are damaged copies of sound ones and things grown from grammar; each run is repeatable by its seed.
"""

import io
import json
import random
import struct
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.adapter_format import read_adapter
from registry.archives import opened
from registry.config import RegistryConfig
from registry.errors import InvalidAdapter, LimitExceeded
from registry.types import Fault
from tests.registry.test_archives import tarred, zipped
from tests.registry.uploads import framed, make_base, make_config, make_tensors, paths_of, safetensors_bytes

BASE = make_base()
LIMITS = RegistryConfig(max_files=16, max_unpacked_bytes=1 << 20, max_adapter_bytes=1 << 20)
CONFIG = json.dumps(make_config()).encode()
WEIGHTS = safetensors_bytes(make_tensors(BASE, paths_of(BASE, "q_proj", "v_proj")), {"format": "pt"})
FILES = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
SLOWEST_S = 5.0
TOKENS = [b"\0", b"\xff" * 8, b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"ustar\0", b"{", b"}", b'"', b"[" * 50]
VALUES: list[Any] = [0, -1, 1 << 62, 1e308, None, True, "", "F32", "BF16", [], {}, [0, 0], [1 << 60, 1 << 60], "\ud800"]

Random = random.Random


def damaged(data: bytes, rng: Random) -> bytes:
    """A few bytes changed, cut, repeated, swapped or put in."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(len(out) + 1) if rng.random() < 0.5 else min(len(out), rng.randrange(600))
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randrange(1, 64)]
            case 4:
                out[at:at] = rng.choice(TOKENS)
            case 5:
                out[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 7, 1 << 16, 1 << 31, 1 << 32, (1 << 64) - 1]))
            case _:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.randrange(1, 200)]
    return bytes(out)


def mangled(value: Any, rng: Random) -> Any:
    """A JSON value with some of its parts replaced, renamed or left out."""
    if rng.random() < 0.04:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        pairs = [(rng.choice(["", "x" * 300, key[::-1]]) if rng.random() < 0.03 else key, value[key]) for key in value]
        return {key: mangled(item, rng) for key, item in pairs if rng.random() > 0.02}
    if isinstance(value, list):
        return [mangled(item, rng) for item in value]
    return value


def mangled_header(rng: Random) -> bytes:
    (size,) = struct.unpack("<Q", WEIGHTS[:8])
    header = mangled(json.loads(WEIGHTS[8 : 8 + size]), rng)
    return framed(json.dumps(header).encode("utf-8", "surrogatepass"), WEIGHTS[8 + size :])


def mangled_config(rng: Random) -> bytes:
    return json.dumps(mangled(json.loads(CONFIG), rng)).encode("utf-8", "surrogatepass")


def some_tar(rng: Random) -> bytes:
    """A tar whose members have types, names, sizes and headers that nobody would write."""
    buffer = io.BytesIO()
    form = rng.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name in rng.sample([*FILES, "../x", "/abs", "a" * 300, "link", "é/ü", "."], rng.randrange(1, 7)):
            info = tarfile.TarInfo(name)
            info.type = rng.choice([tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, b"Z"])
            data = FILES.get(name, b"?" * rng.randrange(2000)) if info.type == tarfile.REGTYPE else b""
            info.size = len(data)
            if rng.random() < 0.2:
                info.pax_headers = {rng.choice(["path", "size", "comment"]): rng.choice(["x", "-1", "9" * 30, "../y"])}
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue() if rng.random() < 0.5 else damaged(buffer.getvalue(), rng)


def some_zip(rng: Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in rng.sample([*FILES, "../x", "/abs", "a" * 300, "dir/", "é/ü"], rng.randrange(1, 7)):
            info = zipfile.ZipInfo(name)
            info.compress_type = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
            info.external_attr = rng.choice([0, 0o100644, 0o120777, 0o010644, 0o040755]) << 16
            archive.writestr(info, FILES.get(name, b"?" * rng.randrange(2000)))
    return buffer.getvalue() if rng.random() < 0.5 else damaged(buffer.getvalue(), rng)


def as_weights(make: Callable[[Random], bytes]) -> Callable[[Random], dict[str, bytes]]:
    return lambda rng: {**FILES, "adapter_model.safetensors": make(rng)}


KINDS: dict[str, Callable[[Random], dict[str, bytes]]] = {
    "header-bytes": as_weights(lambda rng: damaged(WEIGHTS, rng)),
    "header-json": as_weights(mangled_header),
    "config-bytes": lambda rng: {**FILES, "adapter_config.json": damaged(CONFIG, rng)},
    "config-json": lambda rng: {**FILES, "adapter_config.json": mangled_config(rng)},
    "tokenizer": lambda rng: {**FILES, "tokenizer.json": damaged(b'{"model": {"vocab": {"a": 1}}}', rng)},
    "claim": lambda rng: {**FILES, "lorafleet_base.json": damaged(b'{"base_id": "acme/tiny", "digest": null}', rng)},
    "zip": lambda rng: {"a.zip": damaged(zipped(FILES), rng)},
    "tar": lambda rng: {"a.tar": damaged(tarred(FILES, "w"), rng)},
    "tar-gz": lambda rng: {"a.tgz": damaged(tarred(FILES), rng)},
    "zip-grown": lambda rng: {"a.zip": some_zip(rng)},
    "tar-grown": lambda rng: {"a.tar": some_tar(rng)},
}


def outcome(folder: Path, contents: dict[str, bytes]) -> str:
    """How the upload ends: served, or the class of its refusal. Anything else raised is a fault of ours."""
    files = {}
    for number, (name, data) in enumerate(contents.items()):
        files[name] = folder / str(number)
        files[name].write_bytes(data)
    started_s = time.monotonic()
    try:
        with opened(files, LIMITS) as found:
            read_adapter(found, BASE, LIMITS)
    except InvalidAdapter as error:
        return "invalid" if all(is_clean(fault) for fault in error.faults) else "unclear"
    except LimitExceeded:
        return "limit"
    finally:
        assert time.monotonic() - started_s < SLOWEST_S
    return "served"


def is_clean(fault: Fault) -> bool:
    return bool(fault.code) and 0 < len(fault.message) < 1000


def fuzz(folder: Path, kind: str, num_inputs: int, seed: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number in range(num_inputs):
        contents = KINDS[kind](Random(f"{kind}/{seed}/{number}"))
        try:
            outcomes[outcome(folder, contents)] += 1
        except BaseException as error:
            raise AssertionError(f"input {kind}/{seed}/{number} was not refused cleanly") from error
    assert not outcomes["unclear"], outcomes
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_uploads_are_refused_cleanly(kind: str, tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, kind, 150, seed=0)
    assert outcomes["invalid"] > 20, outcomes


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_uploads_are_refused_cleanly(kind: str, tmp_path: Path) -> None:
    """2,000 of each kind: 22,000 in all."""
    outcomes = fuzz(tmp_path, kind, 2000, seed=1)
    assert outcomes["invalid"] > 200, outcomes
