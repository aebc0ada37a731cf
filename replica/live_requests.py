"""The requests that were submitted and have not ended, and whether more may come. Knows not what is done for them."""

import threading
from collections import defaultdict

from replica.errors import InvalidRequest, Overloaded, ReplicaError
from replica.sequence import RequestGroup


class LiveRequests:
    """Live requests by id; a request *waits* until a step has worked on it. Safe from any thread."""

    def __init__(self, lock: threading.RLock, max_waiting: int) -> None:
        self._ended = threading.Condition(lock)
        self._max_waiting = max_waiting
        self._groups: dict[str, RequestGroup] = {}
        self._waiting: set[str] = set()
        self._refusal: ReplicaError | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        return f"LiveRequests({len(self)}, waiting={self.num_waiting}, refusal={self._refusal!r})"

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def get(self, request_id: str) -> RequestGroup | None:
        return self._groups.get(request_id)

    def all(self) -> tuple[RequestGroup, ...]:
        with self._ended:
            return tuple(self._groups.values())

    def waiting_since(self) -> dict[str, list[float]]:
        """Tenant -> when each of its requests that wait has arrived."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        with self._ended:
            for key in self._waiting.copy():
                group = self._groups.get(key)
                if group is not None:
                    found[group.tenant].append(group.arrived_at_s)
        return found

    def add(self, group: RequestGroup) -> None:
        """Raises what `refuse` said, InvalidRequest for an id in use, Overloaded when too many wait."""
        with self._ended:
            if self._refusal is not None:
                raise type(self._refusal)(self._refusal.message)
            if group.key in self._groups:
                raise InvalidRequest(f"request_id {group.key!r} is in use")
            if self.num_waiting >= self._max_waiting:
                raise Overloaded(f"{self.num_waiting} requests are waiting; max_waiting is {self._max_waiting}")
            self._groups[group.key] = group
            self._waiting.add(group.key)

    def refuse(self, reason: ReplicaError, *, at_last: bool = False) -> None:
        """Take no more requests. The first reason stays, unless another one comes `at_last`."""
        with self._ended:
            if self._refusal is None or at_last:
                self._refusal = reason

    def start(self, group: RequestGroup) -> bool:
        """Note that a step works on `group`; True the first time."""
        if group.key not in self._waiting:
            return False
        self._waiting.discard(group.key)
        return True

    def end(self, group: RequestGroup) -> None:
        with self._ended:
            self._groups.pop(group.key, None)
            self._waiting.discard(group.key)
            self._ended.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until none is live, at most `timeout_s` seconds; whether that came to be."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._groups, timeout_s)

    def check_integrity(self) -> None:
        """Assert that what waits is live."""
        with self._ended:
            assert self._waiting <= self._groups.keys(), "a request that ended is still counted as waiting"
