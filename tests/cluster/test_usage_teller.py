"""Use on its way to a registry that is away, stumbles, or answers too late."""

import asyncio

import pytest

from cluster.usage_teller import tell_forever, tell_last
from registry.errors import RegistryUnavailable
from registry.usage_ledger import UsageLedger
from registry.usage_records import Consumer, UsageBatch


class Taker:
    """Meets each batch with the next of `troubles`, and takes it when there is none left."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.taken: dict[int, UsageBatch] = {}
        self.has_taken = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def take_usage(self, batch: UsageBatch) -> int:
        if self.troubles:
            raise self.troubles.pop(0)
        assert self.taken.setdefault(batch.sequence, batch) == batch
        self.has_taken.set()
        await self.gate.wait()
        return batch.sequence


@pytest.fixture
def ledger() -> UsageLedger:
    ledger = UsageLedger("g", lambda: 0.0)
    ledger.add(Consumer("acme"), requests=1)
    return ledger


@pytest.mark.parametrize("trouble", [RegistryUnavailable("away"), AttributeError("take_usage")])
async def test_last_telling_raises_nothing_and_says_what_is_lost(
    ledger: UsageLedger, trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    await tell_last(ledger, Taker(trouble))
    assert caplog.text.count("is lost") == 1


async def test_use_is_told_again_after_every_kind_of_trouble(ledger: UsageLedger) -> None:
    taker = Taker(RegistryUnavailable("away"), RuntimeError("a fault"))
    telling = asyncio.create_task(tell_forever(ledger, taker, period_s=0.001))
    await asyncio.wait_for(taker.has_taken.wait(), 5.0)
    telling.cancel()
    assert [batch.entries[0].requests for batch in taker.taken.values()] == [1]


async def test_batch_under_way_when_the_process_ends_is_told_once_more_and_unchanged(ledger: UsageLedger) -> None:
    taker = Taker()
    taker.gate.clear()
    telling = asyncio.create_task(tell_forever(ledger, taker, period_s=0.001))
    await asyncio.wait_for(taker.has_taken.wait(), 5.0)
    ledger.add(Consumer("acme"), requests=1)
    telling.cancel()
    taker.gate.set()
    await tell_last(ledger, taker)
    assert [batch.entries[0].requests for batch in taker.taken.values()] == [1, 1]
    assert ledger.batch() is None
