"""Lets many callers wait for the next change of one registry without blocking a thread each.

A notification wakes them at once; polling the database catches what another registry wrote.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from registry.service import Registry
from registry.types import Activation, ActivationState, CatalogDelta, Event, VersionStates

_FINAL = frozenset({ActivationState.DONE, ActivationState.FAILED, ActivationState.SUPERSEDED})


class _Waiter:
    """One caller that waits, on whichever event loop it runs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._changed.set)

    async def sleep(self, timeout_s: float) -> None:
        """Until woken, or for `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()


class Watch:
    """Waits on one registry. `notify` may be called from any thread; the rest belongs on an event loop."""

    def __init__(self, registry: Registry, *, poll_interval_s: float = 1.0) -> None:
        self._registry = registry
        self._poll_interval_s = poll_interval_s
        self._lock = threading.Lock()
        self._waiters: set[_Waiter] = set()

    def __repr__(self) -> str:
        return f"Watch(num_waiting={len(self._waiters)})"

    def notify(self) -> None:
        """Wake every waiter, after a change made in this process."""
        with self._lock:
            waiters = tuple(self._waiters)
        for waiter in waiters:
            waiter.wake()

    async def wait(self, after_revision: int, timeout_s: float, *, with_access: bool = False) -> CatalogDelta | None:
        """The first change after that revision, or None when `timeout_s` has passed without one."""
        deadline = monotonic() + timeout_s
        with self._waiting() as waiter:
            while True:
                delta = await asyncio.to_thread(self._registry.changes, after_revision, with_access=with_access)
                if delta is not None or not await self._pause(waiter, deadline):
                    return delta

    async def wait_activation(self, activation_id: int, timeout_s: float) -> Activation:
        """The activation once it is done, failed or superseded, or as it stands when `timeout_s` has passed.

        Raises AdapterNotFound.
        """
        deadline = monotonic() + timeout_s
        with self._waiting() as waiter:
            while True:
                activation = await asyncio.to_thread(self._registry.activation, activation_id)
                if activation.state in _FINAL or not await self._pause(waiter, deadline):
                    return activation

    async def wait_events(self, after: int, limit: int, timeout_s: float) -> tuple[Event, ...]:
        """At most `limit` events after that revision, once there is one; none when `timeout_s` has passed."""
        deadline = monotonic() + timeout_s
        with self._waiting() as waiter:
            while True:
                events = await asyncio.to_thread(self._registry.events, after, limit)
                if events or not await self._pause(waiter, deadline):
                    return events

    async def wait_states(self, name: str, number: int, unless: str | None, timeout_s: float) -> VersionStates:
        """Where the version is, once that is another state than the etag `unless`, or when `timeout_s` has passed.

        Raises AdapterNotFound.
        """
        deadline = monotonic() + timeout_s
        with self._waiting() as waiter:
            while True:
                states = await asyncio.to_thread(self._registry.version_states, name, number)
                if states.etag != unless or not await self._pause(waiter, deadline):
                    return states

    async def _pause(self, waiter: _Waiter, deadline: float) -> bool:
        """Sleep until something may have changed; False when the deadline had passed already."""
        remaining = deadline - monotonic()
        if remaining <= 0:
            return False
        await waiter.sleep(min(self._poll_interval_s, remaining))
        return True

    @contextmanager
    def _waiting(self) -> Iterator[_Waiter]:
        waiter = _Waiter()
        with self._lock:
            self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.discard(waiter)
