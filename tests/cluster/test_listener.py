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


def test_port_in_use_is_an_error_and_leaves_nothing(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", listener.port)


def test_closed_listener_refuses(script: ModuleType) -> None:
    held = Listener("127.0.0.1", 0)
    held.close()
    assert not held.path.parent.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port))
