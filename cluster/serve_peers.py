"""The other gateways of a fleet over Serve: each is asked for its own metrics, so that one scrape covers all."""

import logging
from typing import Any

logger = logging.getLogger("lorafleet.gateway")
ASK_TIMEOUT_S = 2.0


class ServePeers:
    """`router.gateway.Peers` over the handle of the gateways' own deployment, of which `instance` is one.

    Serve asks all of them at once and hands over all answers or none: while one hangs, until Serve has replaced it,
    the others are not known either.
    """

    def __init__(self, handle: Any, instance: str) -> None:
        self._handle = handle
        self._instance = instance

    def __repr__(self) -> str:
        return f"ServePeers(of {self._instance})"

    async def names(self) -> list[str]:
        """The instances of the others, in order."""
        return sorted({name for name in await self._ask("instance") if name != self._instance})

    async def metrics(self) -> dict[str, bytes]:
        """The metrics of the others by instance."""
        return dict(answer for answer in await self._ask("metrics_for", asker=self._instance) if answer is not None)

    async def metrics_of(self, instance: str) -> bytes | None:
        """The metrics of one of them; None when none of this name answers."""
        answers = await self._ask("metrics_for", asker=self._instance, wanted=instance)
        return next((text for _, text in filter(None, answers)), None)

    async def _ask(self, method: str, **arguments: str) -> list[Any]:
        """What they answer, without those that failed."""
        try:
            asked = self._handle.broadcast(method, **arguments)
            answers = await asked.results_async(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            logger.warning("the other gateways do not answer: %r", error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]
