"""Which replicas Serve counts as running, as this process last heard.

Serve tells routers the moment it begins to stop a replica, long before that one's lease ends. Its routers live in
classes that are pickled by value, so they leave the news in this module, which a process has once.
"""

import threading
from collections.abc import Iterable


class RunningReplicas:
    """Replica ids by deployment. Told on Serve's router thread, asked on the gateway's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, frozenset[str]] = {}
        self._ever: dict[str, frozenset[str]] = {}

    def tell(self, deployment: str, replica_ids: Iterable[str]) -> None:
        """Take all that run now."""
        now = frozenset(replica_ids)
        with self._lock:
            self._now[deployment] = now
            self._ever[deployment] = self._ever.get(deployment, frozenset()) | now

    def gone(self, deployment: str, replica_ids: Iterable[str]) -> frozenset[str]:
        """Those of `replica_ids` that ran once and do not any more; one that has yet to start is not among them."""
        asked = frozenset(replica_ids)
        with self._lock:
            now = self._now.get(deployment, frozenset())
            ever = self._ever[deployment] = self._ever.get(deployment, frozenset()) & (asked | now)
            return (ever - now) & asked

    def starting(self, deployment: str, replica_ids: Iterable[str]) -> frozenset[str]:
        """Those of `replica_ids` that no router has heard of yet; none while no router has heard anything."""
        with self._lock:
            if deployment not in self._now:
                return frozenset()
            return frozenset(replica_ids) - self._now[deployment] - self._ever[deployment]


RUNNING = RunningReplicas()
"""This process's."""
