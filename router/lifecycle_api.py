"""The endpoints of a version's later life: canaries, quarantine, where it is, what is collected, and the audit log."""

from starlette.requests import Request
from starlette.responses import Response

from router.answers import answer, answer_activation
from router.auth import Principal
from router.gateway import Gateway
from router.ownership import own, see
from router.params import adapter_name, alias_name, query_int, query_seconds, version_number
from router.parsing import parse_body, read_body
from router.schemas import CanaryBody, CollectBody, HaltBody, PromoteBody, QuarantineBody


class LifeCycleApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry
        self._config = gateway.config

    async def canary(self, request: Request, caller: Principal) -> Response:
        """Start a canary or change its weight; it takes requests once every replica has it."""
        name, body = adapter_name(request), parse_body(CanaryBody, await self._read(request))
        await own(self._registry, caller, name)
        activation = await self._registry.canary(
            name,
            body.version,
            body.weight,
            alias=alias_name(body.alias),
            actor=caller.tenant,
            expected_revision=body.expected_revision,
        )
        return await answer_activation(self._gateway, activation, body.wait)

    async def promote(self, request: Request, caller: Principal) -> Response:
        """Move the alias to its canary."""
        name, body = adapter_name(request), parse_body(PromoteBody, await self._read(request) or b"{}")
        await own(self._registry, caller, name)
        activation = await self._registry.promote(
            name, alias=alias_name(body.alias), actor=caller.tenant, expected_revision=body.expected_revision
        )
        return await answer_activation(self._gateway, activation, body.wait)

    async def halt(self, request: Request, caller: Principal) -> Response:
        """End the canary: every request goes where the alias points."""
        name, body = adapter_name(request), parse_body(HaltBody, await self._read(request) or b"{}")
        await own(self._registry, caller, name)
        record = await self._registry.halt(
            name, alias=alias_name(body.alias), actor=caller.tenant, expected_revision=body.expected_revision
        )
        return answer(record)

    async def remove_alias(self, request: Request, caller: Principal) -> Response:
        name, alias = adapter_name(request), alias_name(request.path_params["alias"])
        given = "expected_revision" in request.query_params
        expected = query_int(request, "expected_revision", 0) if given else None
        await own(self._registry, caller, name)
        return answer(await self._registry.remove_alias(name, alias, actor=caller.tenant, expected_revision=expected))

    async def quarantine(self, request: Request, caller: Principal) -> Response:
        """Stop serving a version's content everywhere, at once."""
        name, number = adapter_name(request), version_number(request)
        body = parse_body(QuarantineBody, await self._read(request))
        await own(self._registry, caller, name)
        return answer(await self._registry.quarantine(name, number, actor=caller.tenant, reason=body.reason))

    async def version_states(self, request: Request, caller: Principal) -> Response:
        """Where a version is; waits up to `wait_s` for an etag other than `unless`."""
        wait_s = min(query_seconds(request, "wait_s"), self._config.activation_wait_s)
        unless = request.query_params.get("unless")
        name, number = adapter_name(request), version_number(request)
        await see(self._registry, caller, name)
        return answer(await self._registry.version_states(name, number, unless, wait_s))

    async def audit(self, request: Request, caller: Principal) -> Response:
        after = query_int(request, "after", 0)
        limit = min(query_int(request, "limit", self._config.max_events), self._config.max_events)
        return answer(await self._registry.audit(after, limit))

    async def collect(self, request: Request, caller: Principal) -> Response:
        body = parse_body(CollectBody, await self._read(request) or b"{}")
        return answer(await self._registry.collect(actor=caller.tenant, dry_run=body.dry_run))

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._config.requests)
