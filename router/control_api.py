"""The control endpoints: activate, roll back, retire, and look. Names are checked before anything is stored."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from registry.errors import AdapterNotFound, RegistryUnavailable
from registry.types import AdapterRecord
from router.answers import answer, answer_activation, answer_list, settled
from router.auth import Principal
from router.gateway import Gateway
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


class ControlApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry
        self._config = gateway.config

    async def adapters(self, request: Request, caller: Principal) -> Response:
        return answer_list(await self._registry.adapters())

    async def adapter(self, request: Request, caller: Principal) -> Response:
        return answer(await self._registry.adapter(adapter_name(request)))

    async def version(self, request: Request, caller: Principal) -> Response:
        """One version and its manifest."""
        name, number = adapter_name(request), version_number(request)
        version = (await self._registry.adapter(name)).version(number)
        if version is None:
            raise AdapterNotFound(f"adapter {name!r} has no version {number}")
        manifest = await self._registry.manifest(version.digest)
        return JSONResponse({"version": version.model_dump(mode="json"), "manifest": manifest.model_dump(mode="json")})

    async def put_alias(self, request: Request, caller: Principal) -> Response:
        """Answers when every gateway knows, or after `activation_wait_s` with what is still missing."""
        name, alias = adapter_name(request), alias_name(request.path_params["alias"])
        body = parse_body(AliasBody, await self._read(request))
        activation = await self._registry.activate(
            name, alias, body.version, actor=caller.tenant, expected_revision=body.expected_revision
        )
        return await answer_activation(self._gateway, activation, body.wait)

    async def rollback(self, request: Request, caller: Principal) -> Response:
        name = adapter_name(request)
        body = parse_body(RollbackBody, await self._read(request) or b"{}")
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
        return await self._registry.retire(adapter_name(request), number, actor=caller.tenant, deadline_s=deadline_s)

    async def replicas(self, request: Request, caller: Principal) -> Response:
        """What the replicas last reported; the catalog's word when the registry cannot be reached."""
        try:
            return answer_list(await self._registry.replicas())
        except RegistryUnavailable:
            return answer_list(self._gateway.catalog.replicas)

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
        activation = await self._registry.activation(activation_id)
        return answer(await settled(self._gateway, activation, min(wait_s, self._config.activation_wait_s)))

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._config.requests.max_body_bytes)
