"""The other gateways of a fleet over Serve: each is asked for its own metrics, so that one scrape covers all."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from router.errors import GatewaySilent

logger = logging.getLogger("lorafleet.gateway")
ASK_TIMEOUT_S = 2.0


class ServePeers:
    """`router.gateway.Peers` over the handle of the gateways' own deployment, of which `instance` is one.

    Serve asks all of them at once and hands over all answers or none: while one hangs, until Serve has replaced it,
    none is heard. `recorded` gives the instances that the registry has a lease of; it may raise.
    """

    def __init__(self, handle: Any, instance: str, recorded: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._handle = handle
        self._instance = instance
        self._recorded = recorded

    def __repr__(self) -> str:
        return f"ServePeers(of {self._instance})"

    async def names(self) -> list[str]:
        """The instances of the others, in order: those on record, and those that answer.

        Raises GatewaySilent when there is no record and they do not all answer.
        """
        recorded, (answers, is_whole) = await asyncio.gather(self._ask_registry(), self._ask("instance"))
        if recorded is None and not is_whole:
            raise GatewaySilent("which gateways there are cannot be told: neither they nor the registry answer")
        return sorted({*(recorded or ()), *answers} - {self._instance})

    async def metrics(self) -> dict[str, bytes]:
        """The metrics of the others by instance, of those that answer."""
        answers, _ = await self._ask("metrics_for", asker=self._instance)
        return dict(filter(None, answers))

    async def metrics_of(self, instance: str) -> bytes | None:
        """The metrics of one of them; None when there is none of this name.

        Raises GatewaySilent when it is on record, or might be there, and does not answer.
        """
        answers, is_whole = await self._ask("metrics_for", asker=self._instance, wanted=instance)
        for _, text in filter(None, answers):
            return bytes(text)
        recorded = await self._ask_registry()
        if recorded is None and not is_whole:
            raise GatewaySilent(f"whether there is a gateway {instance[:80]!r} cannot be told: not all of them answer")
        if instance in (recorded or ()):
            raise GatewaySilent(f"gateway {instance} does not answer")
        return None

    async def _ask(self, method: str, **arguments: str) -> tuple[list[Any], bool]:
        """What they answer, without those that failed, and whether all have answered."""
        try:
            asked = self._handle.broadcast(method, **arguments)
            answers = await asked.results_async(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            logger.warning("the other gateways do not answer: %r", error)
            return [], False
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        return told, len(told) == len(answers)

    async def _ask_registry(self) -> Sequence[str] | None:
        """The instances on record; None when the registry does not say."""
        try:
            return await self._recorded()
        except Exception as error:
            logger.warning("the registry does not say which gateways there are: %s", error)
            return None
