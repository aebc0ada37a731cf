"""Holds the port of HAProxy: connections that come while there is no HAProxy wait for the next one.

The socket listens in this process, which never takes a connection; every HAProxy gets it handed over
(`deploy/haproxy-loopback`), so that the kernel keeps what nobody has taken yet. Knows nothing of Ray.
"""

import atexit
import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

VARIABLE = "HAPROXY_LISTENER"
"""Names the socket where HAProxy's start script asks for the port."""
BACKLOG = 4096
RETRY_S = 0.1


class Listener:
    """Listens on `host`:`port` until it is closed; `::` is every address, those of IPv4 too.

    Raises OSError when the port cannot be had.

    The socket is handed to any process of this user that asks at `path`: `host:port` and a file descriptor.
    """

    def __init__(self, host: str, port: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lf-port-"))  # only this user may look into it
        self.path = self._folder / "listener"
        self._door = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(str(self.path))
            self._door.listen()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            is_dual = host == "::" and socket.has_dualstack_ipv6()
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
        except OSError:
            self._door.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.port: int = self._socket.getsockname()[1]
        self._name = f"{host}:{self.port}".encode()
        self._is_closed = False
        threading.Thread(target=self._hand_out, name="listener", daemon=True).start()

    def __repr__(self) -> str:
        return f"Listener({self._name.decode()}, {self.path})"

    def close(self) -> None:
        """Refuse connections from now on, but for those that an HAProxy takes."""
        self._is_closed = True
        for each in (self._door, self._socket):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hand_out(self) -> None:
        """Until it is closed: what fails for a moment (no free descriptor, say) may not keep out the next HAProxy."""
        while True:
            try:
                asker, _ = self._door.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(RETRY_S)
                continue
            with asker, contextlib.suppress(OSError):
                socket.send_fds(asker, [self._name], [self._socket.fileno()])


def listen_for_proxies(host: str, port: int) -> Listener:
    """A listener that every process started from here finds by its environment; it is closed when this one ends."""
    listener = Listener(host, port)
    atexit.register(listener.close)
    os.environ[VARIABLE] = str(listener.path)
    return listener
