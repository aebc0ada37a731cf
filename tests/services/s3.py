"""A real S3-protocol endpoint on loopback: moto's server in a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fleet_process import free_port

START_S = 60.0
INSTALL_HINT = "pip install 'lorafleet[services]'"


@contextmanager
def running_s3(bucket: str) -> Iterator[str]:
    """The endpoint's URL, with an empty bucket; the environment names it to every client until the end."""
    for package in ("moto", "s3fs"):
        pytest.importorskip(package, reason=INSTALL_HINT)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(server, port)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", url)
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
            yield url
    finally:
        server.terminate()
        server.wait(timeout=10)


def _wait(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "the S3 endpoint ended at once; is moto[server] installed?"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the S3 endpoint did not start")
