"""The held port, and what HAProxy's start script makes of Serve's configuration."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cluster.listener import Listener
from tests.deploy_scripts import load_script

SERVES = """frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:{port}
    use_backend fleet if is_fleet
listen stats
  bind *:8404
"""
IDLE = SERVES.replace("    use_backend fleet if is_fleet\n", "")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("haproxy-loopback", monkeypatch)


@pytest.fixture
def listener() -> Iterator[Listener]:
    held = Listener("127.0.0.1", 0)
    yield held
    held.close()


def test_connection_that_nobody_takes_waits_for_the_next_who_does(listener: Listener, script: ModuleType) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(b"hello")
        dies, takes = (
            socket.socket(fileno=script.borrow(str(listener.path), f"127.0.0.1:{listener.port}")) for _ in range(2)
        )
        dies.close()
        with takes:
            takes.settimeout(10)
            taken, _ = takes.accept()
            with taken:
                assert taken.recv(5) == b"hello"


def test_port_of_another_address_is_not_borrowed(listener: Listener, script: ModuleType) -> None:
    assert script.borrow(str(listener.path), "127.0.0.1:1") is None
    assert script.borrow("/nowhere/listener", f"127.0.0.1:{listener.port}") is None


def test_frontend_takes_the_held_port_once_it_serves_something(listener: Listener, script: ModuleType) -> None:
    text, idle, door = SERVES.format(port=listener.port), Path("/x/idle.sock"), str(listener.path)
    lines = script.rewritten(text, idle, door).splitlines()
    assert lines[1] == "    bind 127.0.0.1:9101"
    assert lines[3].startswith("    bind fd@")
    assert lines[6] == "  bind 127.0.0.1:8404"
    socket.socket(fileno=int(lines[3].rpartition("@")[2])).close()
    idle_lines = script.rewritten(IDLE.format(port=listener.port), idle, door).splitlines()
    assert idle_lines[3] == "    bind unix@/x/idle.sock"


def test_frontend_keeps_its_address_where_nobody_holds_it(script: ModuleType) -> None:
    assert "    bind 127.0.0.1:8000\n" in script.rewritten(IDLE.format(port=8000), Path("/x/idle.sock"), None)


EVERYWHERE = ["0.0.0.0", "::"] if socket.has_dualstack_ipv6() else ["0.0.0.0"]


@pytest.mark.parametrize("host", EVERYWHERE)
def test_port_held_on_every_address_is_the_one_that_serve_writes_with_a_star(script: ModuleType, host: str) -> None:
    held = Listener(host, 0)
    try:
        assert script.borrow(str(held.path), "*:1") is None
        assert script.borrow(str(held.path), f"127.0.0.1:{held.port}") is None
        text = SERVES.replace("127.0.0.1:{port}", f"*:{held.port}")
        lines = script.rewritten(text, Path("/x/idle.sock"), str(held.path)).splitlines()
        assert lines[3].startswith("    bind fd@")
        with (
            socket.socket(fileno=int(lines[3].rpartition("@")[2])) as taker,
            socket.create_connection(("127.0.0.2", held.port)) as client,
        ):
            client.sendall(b"hello")
            taker.settimeout(10)
            taken, _ = taker.accept()
            with taken:
                assert taken.recv(5) == b"hello"
    finally:
        held.close()


def test_public_frontend_stays_public_and_the_others_do_not(script: ModuleType) -> None:
    text = SERVES.replace("127.0.0.1:{port}", "*:8000") + "frontend grpc_frontend\n    bind *:9000 proto h2\n"
    lines = script.rewritten(text, Path("/x/idle.sock"), None).splitlines()
    assert [line.strip() for line in lines if "bind" in line] == [
        "bind 127.0.0.1:9101",
        "bind *:8000",
        "bind 127.0.0.1:8404",
        "bind *:9000 proto h2",
    ]


def test_port_in_use_is_an_error_and_leaves_nothing(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", listener.port)


def test_closed_listener_refuses(script: ModuleType) -> None:
    held = Listener("127.0.0.1", 0)
    held.close()
    assert not held.path.parent.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port))
