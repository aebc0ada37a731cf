"""Waiting for changes: at once on a notification, within the poll interval without one, never past the timeout."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.errors import AdapterNotFound
from registry.service import Registry
from registry.types import ActivationState
from registry.watch import Watch
from tests.registry.uploads import make_base, open_registry, plain_upload

pytestmark = pytest.mark.usefixtures("backend")
BASE = make_base()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = open_registry(tmp_path / "data")
    registry.publish_base(BASE, actor="r")
    yield registry
    registry.close()


def push(registry: Registry, folder: Path, seed: int = 0) -> str:
    return registry.push("alice", plain_upload(folder / f"u{seed}", BASE, seed), owner="o").version.digest


async def test_wait_answers_at_once_when_there_is_news(registry: Registry) -> None:
    delta = await Watch(registry).wait(0, 10.0)
    assert delta is not None
    assert delta.revision == 1


async def test_wait_ends_empty_at_the_timeout(registry: Registry) -> None:
    began = time.monotonic()
    assert await Watch(registry, poll_interval_s=0.01).wait(1, 0.1) is None
    assert 0.1 <= time.monotonic() - began < 2.0
    assert await Watch(registry).wait(1, 0.0) is None


async def test_notification_wakes_every_waiter(registry: Registry, tmp_path: Path) -> None:
    watch = Watch(registry, poll_interval_s=60.0)
    waiting = [asyncio.create_task(watch.wait(1, 60.0)) for _ in range(5)]
    await asyncio.sleep(0.1)
    assert repr(watch) == "Watch(num_waiting=5)"
    await asyncio.to_thread(push, registry, tmp_path)
    threading.Thread(target=watch.notify).start()
    deltas = await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
    assert {delta.revision for delta in deltas if delta is not None} == {3}
    assert repr(watch) == "Watch(num_waiting=0)"


async def test_change_by_another_registry_is_found_by_polling(registry: Registry, tmp_path: Path) -> None:
    other = open_registry(tmp_path / "data")
    watch = Watch(registry, poll_interval_s=0.05)
    waiting = asyncio.create_task(watch.wait(1, 30.0))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(push, other, tmp_path)
    delta = await asyncio.wait_for(waiting, 5.0)
    assert delta is not None
    assert [record.name for record in delta.adapters] == ["alice"]
    other.close()


async def test_cancelled_waiter_is_forgotten(registry: Registry) -> None:
    watch = Watch(registry, poll_interval_s=60.0)
    waiting = asyncio.create_task(watch.wait(1, 60.0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert repr(watch) == "Watch(num_waiting=0)"
    watch.notify()


async def test_waiter_that_is_cancelled_while_it_wakes_up_ends(registry: Registry) -> None:
    watch = Watch(registry, poll_interval_s=60.0)
    for ticks in range(6):
        waiting = asyncio.create_task(watch.wait(1, 60.0))
        await asyncio.sleep(0.05)
        watch.notify()
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 5.0)


async def test_activation_is_awaited_until_it_is_done(registry: Registry, tmp_path: Path) -> None:
    watch = Watch(registry, poll_interval_s=0.05)
    digest = await asyncio.to_thread(push, registry, tmp_path)
    assert (await watch.wait_activation(1, 0.05)).state is ActivationState.PENDING
    waiting = asyncio.create_task(watch.wait_activation(1, 30.0))
    await asyncio.sleep(0.05)
    registry.join_replica(replica_id="r", node_id="n", num_slots=1, base_digest=BASE.digest, staged=[digest])
    registry.renew_replica("r", revision=0, staged=[digest], held=[digest])
    registry.advance()
    assert (await asyncio.wait_for(waiting, 5.0)).state is ActivationState.DONE


async def test_superseded_activation_ends_the_wait(registry: Registry, tmp_path: Path) -> None:
    await asyncio.to_thread(push, registry, tmp_path)
    await asyncio.to_thread(push, registry, tmp_path, 1)
    assert (await Watch(registry).wait_activation(1, 5.0)).state is ActivationState.SUPERSEDED


async def test_unknown_activation_is_not_found(registry: Registry) -> None:
    watch = Watch(registry)
    with pytest.raises(AdapterNotFound):
        await watch.wait_activation(99, 5.0)
    assert repr(watch) == "Watch(num_waiting=0)"


def test_notification_after_the_loop_is_closed_does_no_harm(registry: Registry) -> None:
    watch = Watch(registry, poll_interval_s=0.01)
    assert asyncio.run(watch.wait(1, 0.02)) is None
    watch.notify()
