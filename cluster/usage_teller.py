"""Hands a process's use to the registry, again and again until it is acknowledged."""

import asyncio
import logging
from typing import Protocol

from registry.errors import RegistryError
from registry.usage_ledger import UsageLedger
from registry.usage_records import UsageBatch

logger = logging.getLogger(__name__)
TELL_S = 2.0
"""How often use is handed over; what a process that is killed has not handed over is lost."""


class UsageTaker(Protocol):
    """The registry; a batch that it gets twice counts once."""

    async def take_usage(self, batch: UsageBatch) -> int: ...


async def tell_forever(ledger: UsageLedger, taker: UsageTaker, period_s: float = TELL_S) -> None:
    """Never returns; a registry that is away is asked again."""
    while True:
        await asyncio.sleep(period_s)
        try:
            await tell(ledger, taker)
        except RegistryError as error:
            logger.debug("usage: %s; it is kept", error.message)
        except Exception:
            logger.exception("handing over the usage stumbled; it is kept")


async def tell_last(ledger: UsageLedger, taker: UsageTaker) -> None:
    """Hand over what is left when the process ends; what the registry cannot take now is lost, and told.

    Raises nothing: there is more to do before the process is gone.
    """
    try:
        await tell(ledger, taker)
    except RegistryError as error:
        logger.warning("usage that was not handed over is lost: %s", error.message)
    except Exception:
        logger.exception("usage that was not handed over is lost")


async def tell(ledger: UsageLedger, taker: UsageTaker) -> None:
    """Hand over all there is. Raises RegistryError, and then nothing is lost."""
    while (batch := ledger.batch()) is not None:
        await taker.take_usage(batch)
        ledger.acknowledged(batch.sequence)
