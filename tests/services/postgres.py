"""A real PostgreSQL server for tests: a cluster of its own in a temporary folder, on a free loopback port."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fleet_process import free_port

START_S = 30.0
INSTALL_HINT = "apt-get install postgresql (Debian's package), or put its `bin` folder on the PATH"


def find_binaries() -> Path | None:
    """The folder with `initdb` and `postgres`, where Debian puts them or on the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts[-3])
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def _server_user() -> str | None:
    """PostgreSQL refuses to run as root; Debian's package brings a user for it."""
    if os.getuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"


@contextmanager
def postgres_server(binaries: Path) -> Iterator[str]:
    """A running server's SQLAlchemy URL; it is stopped and its files are removed at the end."""
    user, port = _server_user(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="lf-pg-"))
    data, log = folder / "data", folder / "log"
    try:
        if user is not None:
            shutil.chown(folder, user)
        run = [str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", "lorafleet", "--no-sync"]
        subprocess.run(run, check=True, capture_output=True, user=user, cwd=folder)
        options = ("-c", "listen_addresses=127.0.0.1", "-c", f"port={port}", "-c", f"unix_socket_directories={folder}")
        command = [
            str(binaries / "postgres"),
            "-D",
            str(data),
            *options,
            "-c",
            "fsync=off",
            "-c",
            "max_connections=300",
        ]
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, user=user, cwd=folder)
        try:
            _wait_ready(binaries, port, server, log)
            yield f"postgresql+psycopg://lorafleet@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(binaries: Path, port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    question = [str(binaries / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
    while subprocess.run(question, check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"PostgreSQL did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
