"""The endpoints that keep an adapter at hand whoever asks: pins, and preloading by the clock."""

from starlette.requests import Request
from starlette.responses import Response

from registry.types import Preload
from router.answers import answer
from router.auth import Principal
from router.gateway import Gateway
from router.ownership import own
from router.params import adapter_name
from router.parsing import parse_body, read_body
from router.schemas import PreloadBody


class ResidenceApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._registry = gateway.registry
        self._config = gateway.config

    async def pin(self, request: Request, caller: Principal) -> Response:
        """Keep the adapter's live version in a slot of every replica."""
        return answer(await self._registry.pin(adapter_name(request), actor=caller.tenant))

    async def unpin(self, request: Request, caller: Principal) -> Response:
        return answer(await self._registry.unpin(adapter_name(request), actor=caller.tenant))

    async def set_preload(self, request: Request, caller: Principal) -> Response:
        """Say when the adapter is brought to its homes ahead of its requests."""
        name = adapter_name(request)
        body = parse_body(PreloadBody, await read_body(request.scope, request.receive, self._config.requests))
        await own(self._registry, caller, name)
        preload = Preload(every_s=body.every_s, at=body.at)
        return answer(await self._registry.set_preload(name, preload, actor=caller.tenant))

    async def clear_preload(self, request: Request, caller: Principal) -> Response:
        name = adapter_name(request)
        await own(self._registry, caller, name)
        return answer(await self._registry.set_preload(name, None, actor=caller.tenant))
