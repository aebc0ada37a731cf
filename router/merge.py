"""Several streams as one, in order of arrival."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

from router.dispatch import closing

Item = TypeVar("Item")


class _End:
    """The last thing a stream puts on the queue, with the error that ended it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[Item, None]:
    """Items of all `streams`; the first error ends them all. Closing the result closes every stream."""
    queue: asyncio.Queue[Item | _End] = asyncio.Queue(maxsize=2 * len(streams))
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncIterator[Item], queue: "asyncio.Queue[Item | _End]") -> None:
    try:
        async with closing(stream) as items:
            async for item in items:
                await queue.put(item)
    except Exception as error:
        await queue.put(_End(error))
    else:
        await queue.put(_End())
