"""The token channel: order, finish, reconnect, idle close, and chunks of requests that are gone."""

import asyncio
from contextlib import aclosing

import pytest

from cluster.channel import Batch, Inbox, Outbox, merge_tokens, split_by_request
from replica.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenLogprob


def request(name: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, "tenant", None, (1,), SamplingParams(max_tokens=4, n=n))


def chunk(name: str, token: int, index: int = 0, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(name, index, (token,), finish_reason=finish)


def tokens_of(chunks: list[TokenChunk]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for item in chunks:
        tokens.setdefault(item.request_id, []).extend(item.token_ids)
    return tokens


async def read_all(outbox: Outbox) -> list[TokenChunk]:
    return [item async for batch in outbox.read() for item in batch]


async def test_chunks_of_all_requests_come_in_order_and_the_idle_channel_closes() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.05, coalesce_s=0)
    finished = [outbox.open(request("a")), outbox.open(request("b"))]
    reading = asyncio.create_task(read_all(outbox))
    sent = [chunk("a", 1), chunk("b", 2), chunk("a", 3, finish="stop"), chunk("b", 4, finish="length")]
    await asyncio.to_thread(outbox.put, sent[:2])
    await asyncio.to_thread(outbox.put, sent[2:])
    await asyncio.gather(*finished)
    for name in ("a", "b"):
        outbox.close(name)
    received = await asyncio.wait_for(reading, 2)
    assert tokens_of(received) == {"a": [1, 3], "b": [2, 4]}
    assert [(item.request_id, item.finish_reason) for item in received if item.finish_reason] == [
        ("a", "stop"),
        ("b", "length"),
    ]
    assert outbox.is_abandoned


async def test_channel_stays_open_while_a_request_is_in_flight() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.02, coalesce_s=0)
    outbox.open(request("a"))
    reading = asyncio.create_task(read_all(outbox))
    await asyncio.sleep(0.2)
    assert not reading.done()
    outbox.close("a")
    assert await asyncio.wait_for(reading, 2) == []


async def test_request_is_finished_when_its_last_choice_is() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.05, coalesce_s=0)
    finished = outbox.open(request("a", n=2))
    outbox.put([chunk("a", 1, 0, "stop")])
    await asyncio.sleep(0.01)
    assert not finished.done()
    outbox.put([chunk("a", 1, 1, "stop")])
    await asyncio.wait_for(finished, 1)


async def test_chunks_of_a_closed_request_are_dropped() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.02, coalesce_s=0)
    outbox.open(request("a"))
    outbox.close("a")
    outbox.put([chunk("a", 1)])
    assert await read_all(outbox) == []


async def test_new_reader_takes_over_from_an_old_one() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=5, coalesce_s=0)
    outbox.open(request("a"))
    old = asyncio.create_task(read_all(outbox))
    await asyncio.sleep(0.01)
    async with aclosing(outbox.read()) as new:
        assert await anext(new) == ()
        await asyncio.wait_for(old, 1)
        outbox.put([chunk("a", 7)])
        assert await asyncio.wait_for(anext(new), 1) == (chunk("a", 7),)


async def test_first_token_and_end_go_at_once_and_the_rest_shares_messages() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.05, coalesce_s=2.0)
    outbox.open(request("a"))
    loop = asyncio.get_running_loop()
    async with aclosing(outbox.read()) as messages:
        assert await anext(messages) == ()
        started_s = loop.time()
        outbox.put([chunk("a", 1)])
        assert tokens_of(list(await anext(messages))) == {"a": [1]}
        assert loop.time() - started_s < 1.0, "a first token does not wait"
        for token in (2, 3):
            outbox.put([chunk("a", token)])
            await asyncio.sleep(0.05)
        message = await anext(messages)
        assert loop.time() - started_s > 1.5
        assert [item.token_ids for item in message] == [(2, 3)], "one chunk, both tokens"
        outbox.put([chunk("a", 4)])
        ended_s = loop.time()
        outbox.put([chunk("a", 5, finish="stop")])
        (last,) = await anext(messages)
        assert loop.time() - ended_s < 1.0, "an end does not wait"
        assert (last.token_ids, last.finish_reason) == ((4, 5), "stop")


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


def test_merging_keeps_logprobs_prompt_scores_and_ends() -> None:
    scores = [TokenLogprob(token, -float(token)) for token in range(4)]
    chunks = [
        TokenChunk("a", 0, (0,), (scores[0],), prompt_logprobs=(None, scores[3])),
        TokenChunk("a", 1, (1,), (scores[1],)),
        TokenChunk("a", 0, (2,), (scores[2],), finish_reason="length"),
    ]
    first, second = merge_tokens(chunks)
    assert (first.index, first.token_ids, first.logprobs) == (0, (0, 2), (scores[0], scores[2]))
    assert first.prompt_logprobs == (None, scores[3])
    assert first.finish_reason == "length"
    assert second == chunks[1]


async def test_reader_that_leaves_at_once_is_forgotten() -> None:
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.01, coalesce_s=0)
    reading = outbox.read()
    await anext(reading)
    await reading.aclose()
    assert outbox.is_abandoned


async def test_outbox_of_a_dead_gateway_is_abandoned_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.channel.UNREAD_S", 0.05)
    outbox = Outbox(asyncio.get_running_loop(), linger_s=0.01, coalesce_s=0)
    outbox.open(request("a"))
    outbox.put([chunk("a", 1)])
    await asyncio.sleep(0)
    outbox.close("a")
    assert not outbox.is_abandoned
    await asyncio.sleep(0.1)
    assert outbox.is_abandoned
