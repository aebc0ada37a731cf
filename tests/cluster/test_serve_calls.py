"""Calls through handles: a cancelled caller ends, a slow answer times out, our errors come out as they went in."""

import asyncio

import pytest

from registry.errors import Conflict

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, while it is imported


async def test_call_that_is_cancelled_while_its_answer_arrives_ends_cancelled() -> None:
    from cluster.serve_calls import call

    for ticks in range(4):
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        calling = asyncio.create_task(call(answer, 5.0))
        await asyncio.sleep(0.01)
        answer.set_result(1)
        for _ in range(ticks):
            await asyncio.sleep(0)
        if calling.done():
            break
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling


async def test_slow_answer_times_out() -> None:
    from cluster.serve_calls import call

    with pytest.raises(TimeoutError):
        await call(asyncio.get_running_loop().create_future(), 0.01)


async def test_call_that_the_other_side_cancels_is_lost_and_the_caller_goes_on() -> None:
    from ray.exceptions import RayTaskError

    from cluster.serve_calls import MemberLost, call

    loop = asyncio.get_running_loop()
    for error in (asyncio.CancelledError(), RayTaskError("f", "", asyncio.CancelledError())):
        answer: asyncio.Future[int] = loop.create_future()
        if isinstance(error, asyncio.CancelledError):
            answer.cancel()
        else:
            answer.set_exception(error)
        with pytest.raises(MemberLost) as lost:
            await call(answer, 5.0)
        assert lost.value.__cause__ is not None


async def test_our_own_error_comes_out_as_it_went_in() -> None:
    from cluster.serve_calls import call

    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_exception(Conflict("taken"))
    with pytest.raises(Conflict, match="taken"):
        await call(answer)
