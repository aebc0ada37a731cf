"""The token channel: order, finish, reconnect, idle close, and chunks of requests that are gone."""

import asyncio
from contextlib import aclosing

import pytest

from cluster.channel import Batch, Inbox, Outbox, split_by_request
from replica.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk


def request(name: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, "tenant", None, (1,), SamplingParams(max_tokens=4, n=n))


def chunk(name: str, token: int, index: int = 0, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(name, index, (token,), finish_reason=finish)


async def read_all(outbox: Outbox) -> list[TokenChunk]:
    return [item async for batch in outbox.read() for item in batch]


async def test_chunks_of_all_requests_come_in_order_and_the_idle_channel_closes() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.05)
    finished = [outbox.open(request("a")), outbox.open(request("b"))]
    reading = asyncio.create_task(read_all(outbox))
    sent = [chunk("a", 1), chunk("b", 2), chunk("a", 3, finish="stop"), chunk("b", 4, finish="length")]
    await asyncio.to_thread(outbox.put, sent[:2])
    await asyncio.to_thread(outbox.put, sent[2:])
    await asyncio.gather(*finished)
    for name in ("a", "b"):
        outbox.close(name)
    assert await asyncio.wait_for(reading, 2) == sent
    assert outbox.is_abandoned


async def test_channel_stays_open_while_a_request_is_in_flight() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.02)
    outbox.open(request("a"))
    reading = asyncio.create_task(read_all(outbox))
    await asyncio.sleep(0.2)
    assert not reading.done()
    outbox.close("a")
    assert await asyncio.wait_for(reading, 2) == []


async def test_request_is_finished_when_its_last_choice_is() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.05)
    finished = outbox.open(request("a", n=2))
    outbox.put([chunk("a", 1, 0, "stop")])
    await asyncio.sleep(0.01)
    assert not finished.done()
    outbox.put([chunk("a", 1, 1, "stop")])
    await asyncio.wait_for(finished, 1)


async def test_chunks_of_a_closed_request_are_dropped() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.02)
    outbox.open(request("a"))
    outbox.close("a")
    outbox.put([chunk("a", 1)])
    assert await read_all(outbox) == []


async def test_new_reader_takes_over_from_an_old_one() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=5)
    outbox.open(request("a"))
    old = asyncio.create_task(read_all(outbox))
    await asyncio.sleep(0.01)
    async with aclosing(outbox.read()) as new:
        assert await anext(new) == ()
        await asyncio.wait_for(old, 1)
        outbox.put([chunk("a", 7)])
        assert await asyncio.wait_for(anext(new), 1) == (chunk("a", 7),)


async def test_inbox_hands_over_all_that_waits_and_ends() -> None:
    inbox = Inbox(num_choices=2)
    inbox.put((chunk("a", 1), chunk("a", 2, 1, "stop")))
    inbox.put((chunk("a", 3, 0, "length"),))
    assert [item.token_ids for item in await inbox.get()] == [(1,), (2,), (3,)]
    assert inbox.is_finished
    assert inbox.is_empty


async def test_inbox_raises_the_error_after_the_chunks_before_it() -> None:
    inbox = Inbox(num_choices=1)
    inbox.put((chunk("a", 1),))
    inbox.fail(ValueError("gone"))
    assert len(await inbox.get()) == 1
    with pytest.raises(ValueError, match="gone"):
        await inbox.get()


@pytest.mark.parametrize("batch", [(), (chunk("a", 1),), (chunk("a", 1), chunk("b", 2), chunk("a", 3))])
def test_split_keeps_order_and_loses_nothing(batch: Batch) -> None:
    parts = split_by_request(batch)
    assert sorted(len(part) for part in parts.values()) == sorted(
        sum(item.request_id == name for item in batch) for name in {item.request_id for item in batch}
    )
    assert all(item.request_id == name for name, part in parts.items() for item in part)
