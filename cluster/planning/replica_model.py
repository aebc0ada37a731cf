"""One simulated replica: slots, host memory, a batch that all running requests share, and a queue before it.

Time between events is worked out, not stepped through: while the batch does not change, every running request gains one
token a step, so a request ends when the replica's count of steps reaches a number that is known at its start.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from cluster.planning.machine import Machine

Tier = Literal["slot", "host"]
Schedule = Callable[[float, Callable[[float], None]], None]
"""Calls a function with the time once that time has come."""


@dataclass(slots=True)
class Request:
    """One simulated request and what became of it; times are in seconds of simulated time."""

    adapter: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    replica: int = -1
    was_hit: bool = False
    first_token_s: float = 0.0
    done_s: float = 0.0


@dataclass(slots=True)
class Slots:
    """Which adapters are in slots and how many requests need each; the one idle for longest is the first to leave."""

    num_slots: int
    users: dict[int, int] = field(default_factory=dict)
    idle: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    loading: dict[int, list[Request]] = field(default_factory=dict)

    def holds(self, adapter: int) -> bool:
        return adapter in self.users or adapter in self.idle

    def use(self, adapter: int) -> None:
        self.idle.pop(adapter, None)
        self.users[adapter] = self.users.get(adapter, 0) + 1

    def release(self, adapter: int) -> None:
        left = self.users[adapter] - 1
        if left:
            self.users[adapter] = left
        else:
            del self.users[adapter]
            self.idle[adapter] = None

    def take_room(self) -> tuple[bool, int | None]:
        """Whether there is room for one more, and the adapter that left for it."""
        if len(self.users) + len(self.idle) + len(self.loading) < self.num_slots:
            return True, None
        if not self.idle:
            return False, None
        return True, self.idle.popitem(last=False)[0]


class SimReplica:
    """Takes requests by `submit` and calls `ended` for each; `changed(tier, adapter, is_there)` tells of its caches."""

    def __init__(
        self,
        machine: Machine,
        schedule: Schedule,
        ended: Callable[[Request], None],
        changed: Callable[[Tier, int, bool], None],
    ) -> None:
        self.num_loads = 0
        self._machine = machine
        self._schedule = schedule
        self._ended = ended
        self._changed = changed
        self._slots = Slots(machine.num_slots)
        self._host: OrderedDict[int, None] = OrderedDict()
        self._bus_free_s = 0.0
        self._blocked: deque[Request] = deque()
        self._ready: deque[Request] = deque()
        self._rows: list[tuple[float, int, Request]] = []
        self._in_batch: Counter[int] = Counter()
        self._num_steps = 0.0
        self._counted_s = 0.0
        self._num_started = 0
        self._version = 0
        self._expected_s = -1.0

    def __repr__(self) -> str:
        return f"SimReplica({len(self._rows)} running, {len(self._ready) + len(self._blocked)} waiting)"

    def submit(self, request: Request, now_s: float) -> None:
        request.was_hit = self._slots.holds(request.adapter)
        if not self._acquire(request, now_s):
            self._blocked.append(request)
        self._admit(now_s)

    def _acquire(self, request: Request, now_s: float) -> bool:
        """Pin the adapter, or join or start its load; False when every slot is in use."""
        slots, adapter = self._slots, request.adapter
        if slots.holds(adapter):
            slots.use(adapter)
            self._ready.append(request)
            return True
        waiting = slots.loading.get(adapter)
        if waiting is not None:
            waiting.append(request)
            return True
        has_room, victim = slots.take_room()
        if victim is not None:
            self._changed("slot", victim, False)
        if has_room:
            slots.loading[adapter] = [request]
            self._load(adapter, now_s)
        return has_room

    def _load(self, adapter: int, now_s: float) -> None:
        machine = self._machine
        took_s = machine.swap_s
        if adapter not in self._host:
            took_s += machine.node_load_s
            self._changed("host", adapter, True)
        self._host[adapter] = None
        self._host.move_to_end(adapter)
        if len(self._host) > machine.num_host_adapters:
            self._changed("host", self._host.popitem(last=False)[0], False)
        self.num_loads += 1
        self._bus_free_s = max(now_s, self._bus_free_s) + took_s
        self._schedule(self._bus_free_s, lambda at_s: self._loaded(adapter, at_s))

    def _loaded(self, adapter: int, now_s: float) -> None:
        requests = self._slots.loading.pop(adapter)
        for request in requests:
            self._slots.use(adapter)
            self._ready.append(request)
        self._changed("slot", adapter, True)
        self._admit(now_s)

    def _admit(self, now_s: float) -> None:
        """Start what is ready while there are rows, and say when the next request will end."""
        while self._ready and len(self._rows) < self._machine.num_rows:
            self._start(self._ready.popleft(), now_s)
        self._expect_end(now_s)

    def _start(self, request: Request, now_s: float) -> None:
        self._advance(now_s)
        self._in_batch[request.adapter] += 1
        self._counted_s = max(now_s, self._counted_s) + request.prompt_tokens * self._machine.prefill_token_s
        request.first_token_s = self._counted_s + self._step_s
        self._num_started += 1
        ends_at = self._num_steps + request.output_tokens
        heapq.heappush(self._rows, (ends_at, self._num_started, request))

    def _advance(self, now_s: float) -> None:
        """Count the steps since the last change; none while prompts are computed (`_counted_s` is ahead)."""
        if now_s > self._counted_s:
            if self._rows:
                self._num_steps += (now_s - self._counted_s) / self._step_s
            self._counted_s = now_s

    @property
    def _step_s(self) -> float:
        return self._machine.step_time_s(len(self._in_batch))

    def _expect_end(self, now_s: float) -> None:
        if not self._rows:
            return
        at_s = max(now_s, self._counted_s + (self._rows[0][0] - self._num_steps) * self._step_s)
        if at_s == self._expected_s:
            return
        self._expected_s = at_s
        self._version += 1
        version = self._version
        self._schedule(at_s, lambda then_s: self._end(version, then_s))

    def _end(self, version: int, now_s: float) -> None:
        """End the request whose tokens are all there, unless the batch changed since this was foreseen."""
        if version != self._version:
            return
        self._expected_s = -1.0
        self._advance(now_s)
        ends_at, _, request = heapq.heappop(self._rows)
        self._num_steps = max(self._num_steps, ends_at)
        self._in_batch[request.adapter] -= 1
        if not self._in_batch[request.adapter]:
            del self._in_batch[request.adapter]
        self._slots.release(request.adapter)
        request.done_s = now_s
        # The first token's time was foreseen with the step time of that batch; a smaller batch may have been faster.
        request.first_token_s = min(request.first_token_s, now_s)
        self._ended(request)
        while self._blocked and self._acquire(self._blocked[0], now_s):
            self._blocked.popleft()
        self._admit(now_s)

    def check_integrity(self) -> None:
        """Assert that slots and rows are within their bounds, and that what runs holds its slot."""
        slots = self._slots
        held = len(slots.users) + len(slots.idle) + len(slots.loading)
        assert held <= self._machine.num_slots, f"{held} adapters in {self._machine.num_slots} slots"
        assert len(self._rows) <= self._machine.num_rows
        assert set(self._in_batch) <= set(slots.users)
        assert len(self._rows) + len(self._ready) == sum(slots.users.values())
