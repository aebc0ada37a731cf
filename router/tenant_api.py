"""The endpoints for tenants, their keys and limits, and for who may call an adapter."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from registry.types import Scope, TenantLimits
from router.answers import answer, answer_list
from router.auth import Principal
from router.gateway import Gateway
from router.ownership import own
from router.params import adapter_name, key_id, tenant_name
from router.parsing import parse_body, read_body
from router.schemas import CallersBody, KeyBody, LimitsBody, RotateBody, TenantBody


class TenantApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry

    async def every(self, request: Request, caller: Principal) -> Response:
        return answer_list(await self._registry.tenants())

    async def one(self, request: Request, caller: Principal) -> Response:
        return answer(await self._registry.tenant(tenant_name(request)))

    async def add(self, request: Request, caller: Principal) -> Response:
        body = parse_body(TenantBody, await self._read(request))
        limits = TenantLimits(**body.model_dump(exclude={"name"}))
        return answer(await self._registry.add_tenant(body.name, limits, actor=caller.tenant), 201)

    async def change(self, request: Request, caller: Principal) -> Response:
        """Change the limits that the body names."""
        name, body = tenant_name(request), parse_body(LimitsBody, await self._read(request))
        before = (await self._registry.tenant(name)).limits
        limits = before.model_copy(update=body.model_dump(exclude_unset=True))
        return answer(await self._registry.set_tenant(name, limits, actor=caller.tenant))

    async def remove(self, request: Request, caller: Principal) -> Response:
        """Revoke its keys and forget its limits."""
        name = tenant_name(request)
        await self._registry.remove_tenant(name, actor=caller.tenant)
        return JSONResponse({"name": name, "removed": True})

    async def keys(self, request: Request, caller: Principal) -> Response:
        """Every key, or one tenant's; never a secret."""
        return answer_list(await self._registry.keys(request.query_params.get("tenant")))

    async def new_key(self, request: Request, caller: Principal) -> Response:
        """The one answer that has the secret."""
        name, body = tenant_name(request), parse_body(KeyBody, await self._read(request))
        scopes = tuple(Scope(scope) for scope in body.scopes)
        details: dict[str, Any] = {"expires_at_s": self._end_s(body.expires_in_s), "note": body.note}
        return answer(await self._registry.new_key(name, scopes, actor=caller.tenant, **details), 201)

    async def rotate_key(self, request: Request, caller: Principal) -> Response:
        body = parse_body(RotateBody, await self._read(request) or b"{}")
        made = await self._registry.rotate_key(
            key_id(request),
            overlap_s=body.overlap_s,
            expires_at_s=self._end_s(body.expires_in_s),
            actor=caller.tenant,
        )
        return answer(made, 201)

    async def revoke_key(self, request: Request, caller: Principal) -> Response:
        return answer(await self._registry.revoke_key(key_id(request), actor=caller.tenant))

    async def set_callers(self, request: Request, caller: Principal) -> Response:
        """Say who may call an adapter besides its owner."""
        name, body = adapter_name(request), parse_body(CallersBody, await self._read(request))
        await own(self._registry, caller, name)
        return answer(await self._registry.set_callers(name, tuple(body.callers), actor=caller.tenant))

    def _end_s(self, expires_in_s: float | None) -> float | None:
        return None if expires_in_s is None else self._gateway.wall_s() + expires_in_s

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._gateway.config.requests)
