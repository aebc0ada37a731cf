"""The control endpoints: activate, roll back, retire, and look. Names are checked before anything is stored."""

from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from registry.errors import AdapterNotFound, RegistryUnavailable
from registry.types import Activation, AdapterRecord
from router.answers import answer, answer_activation, answer_list, settled
from router.auth import Principal
from router.gateway import Gateway
from router.ownership import access_of, may_see, own, see, shown_to
from router.params import (
    adapter_name,
    alias_name,
    digits,
    query_int,
    query_seconds,
    version_number,
)
from router.parsing import parse_body, read_body
from router.schemas import AliasBody, RollbackBody

NOBODYS = "-"
"""No adapter has this name."""


class ControlApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry
        self._config = gateway.config

    async def adapters(self, request: Request, caller: Principal) -> Response:
        """The adapters that the caller may call; an admin sees all."""
        every = await self._registry.adapters()
        return answer_list(shown_to(record, caller) for record in every if may_see(access_of(record), caller))

    async def adapter(self, request: Request, caller: Principal) -> Response:
        name = adapter_name(request)
        await see(self._registry, caller, name)
        return answer(shown_to(await self._registry.adapter(name), caller))

    async def version(self, request: Request, caller: Principal) -> Response:
        """One version and its manifest."""
        name, number = adapter_name(request), version_number(request)
        await see(self._registry, caller, name)
        version = (await self._registry.adapter(name)).version(number)
        if version is None:
            raise AdapterNotFound(f"adapter {name!r} has no version {number}")
        manifest = await self._registry.manifest(version.digest)
        return JSONResponse({"version": version.model_dump(mode="json"), "manifest": manifest.model_dump(mode="json")})

    async def put_alias(self, request: Request, caller: Principal) -> Response:
        """Answers when every gateway knows, or after `activation_wait_s` with what is still missing."""
        name, alias = adapter_name(request), alias_name(request.path_params["alias"])
        body = parse_body(AliasBody, await self._read(request))
        await own(self._registry, caller, name)
        activation = await self._registry.activate(
            name, alias, body.version, actor=caller.tenant, expected_revision=body.expected_revision
        )
        return await answer_activation(self._gateway, activation, body.wait)

    async def rollback(self, request: Request, caller: Principal) -> Response:
        name = adapter_name(request)
        body = parse_body(RollbackBody, await self._read(request) or b"{}")
        await own(self._registry, caller, name)
        activation = await self._registry.rollback(name, alias_name(body.alias), actor=caller.tenant)
        return await answer_activation(self._gateway, activation, body.wait)

    async def retire_adapter(self, request: Request, caller: Principal) -> Response:
        return answer(await self._retire(request, caller, None))

    async def retire_version(self, request: Request, caller: Principal) -> Response:
        return answer(await self._retire(request, caller, version_number(request)))

    async def _retire(self, request: Request, caller: Principal, number: int | None) -> AdapterRecord:
        """Requests that run may go on for `deadline_s`; omitted: as long as the registry's setting says."""
        given = "deadline_s" in request.query_params
        deadline_s = query_seconds(request, "deadline_s") if given else None
        name = adapter_name(request)
        await own(self._registry, caller, name)
        return await self._registry.retire(name, number, actor=caller.tenant, deadline_s=deadline_s)

    async def replicas(self, request: Request, caller: Principal) -> Response:
        """What the replicas last reported; the catalog's word when the registry cannot be reached."""
        try:
            replicas = await self._registry.replicas()
        except RegistryUnavailable:
            replicas = self._gateway.catalog.replicas
        return answer_list(self._gateway.placement.states(replicas))

    async def events(self, request: Request, caller: Principal) -> Response:
        """Changes after a revision; waits up to `wait_s` for the first of them."""
        after = query_int(request, "after", 0)
        limit = min(query_int(request, "limit", self._config.max_events), self._config.max_events)
        wait_s = min(query_seconds(request, "wait_s"), self._config.activation_wait_s)
        return answer_list(await self._registry.events(after, limit, wait_s))

    async def activation(self, request: Request, caller: Principal) -> Response:
        """How far an activation is; waits up to `wait_s` for it to end."""
        activation_id = digits(request.path_params["activation_id"], "activation_id")
        wait_s = query_seconds(request, "wait_s")
        activation = await self._seen(activation_id, caller)
        return answer(await settled(self._gateway, activation, min(wait_s, self._config.activation_wait_s)))

    async def _seen(self, activation_id: int, caller: Principal) -> Activation:
        """Raises AdapterNotFound, in the same words and after the same work, whether there is no such activation or
        its adapter is none that the caller may know of."""
        activation: Activation | None = None
        with suppress(AdapterNotFound):
            activation = await self._registry.activation(activation_id)
        access = await self._registry.access_of(NOBODYS if activation is None else activation.name)
        if activation is None or access is None or not may_see(access, caller):
            raise AdapterNotFound(f"there is no activation {activation_id}")
        return activation

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._config.requests)
