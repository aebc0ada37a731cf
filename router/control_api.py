"""The control endpoints: upload, activate, roll back, retire, and look. Names are checked before anything is stored."""

import re
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from registry.errors import AdapterNotFound, Conflict, RegistryUnavailable
from registry.types import ALIAS_PATTERN, LIVE_ALIAS, Activation, ActivationState, is_adapter_name
from router.auth import Principal
from router.errors import BadRequest, InvalidName
from router.gateway import Gateway
from router.metrics import BASE_LABEL
from router.parsing import parse_body, read_body
from router.schemas import AliasBody, RollbackBody
from router.uploads import receive_upload

UNDER_WAY = (ActivationState.PENDING, ActivationState.FLIPPED)
MAX_DIGITS = 12


class ControlApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry
        self._config = gateway.config

    async def push(self, request: Request, caller: Principal) -> Response:
        """201 for new content, 200 for content that this name already has."""
        name = _name(request)
        self._check_not_base(name)
        flags = _flags(request.query_params, {"activate": True, "wait": True})
        async with receive_upload(request, self._config.uploads) as upload:
            flags = _flags(upload.fields, flags)
            result = await self._registry.push(name, upload.files, owner=caller.tenant, activate=flags["activate"])
        if result.activation is not None and flags["wait"]:
            activation = await self._wait(result.activation, self._config.activation_wait_s)
            result = result.model_copy(update={"activation": activation})
        return _record(result, 201 if result.created else 200)

    async def adapters(self, request: Request, caller: Principal) -> Response:
        return _records(await self._registry.adapters())

    async def adapter(self, request: Request, caller: Principal) -> Response:
        return _record(await self._registry.adapter(_name(request)))

    async def version(self, request: Request, caller: Principal) -> Response:
        """One version and its manifest."""
        name, number = _name(request), _number(request)
        version = (await self._registry.adapter(name)).version(number)
        if version is None:
            raise AdapterNotFound(f"adapter {name!r} has no version {number}")
        manifest = await self._registry.manifest(version.digest)
        return JSONResponse({"version": version.model_dump(mode="json"), "manifest": manifest.model_dump(mode="json")})

    async def put_alias(self, request: Request, caller: Principal) -> Response:
        """Answers when every gateway knows, or after `activation_wait_s` with what is still missing."""
        name, alias = _name(request), _alias(request.path_params["alias"])
        body = parse_body(AliasBody, await self._read(request))
        activation = await self._registry.activate(
            name, alias, body.version, actor=caller.tenant, expected_revision=body.expected_revision
        )
        return await self._activated(activation, body.wait)

    async def rollback(self, request: Request, caller: Principal) -> Response:
        name = _name(request)
        body = parse_body(RollbackBody, await self._read(request) or b"{}")
        activation = await self._registry.rollback(name, _alias(body.alias), actor=caller.tenant)
        return await self._activated(activation, body.wait)

    async def retire_adapter(self, request: Request, caller: Principal) -> Response:
        return _record(await self._registry.retire(_name(request), None, actor=caller.tenant))

    async def retire_version(self, request: Request, caller: Principal) -> Response:
        return _record(await self._registry.retire(_name(request), _number(request), actor=caller.tenant))

    async def replicas(self, request: Request, caller: Principal) -> Response:
        """What the replicas last reported; the catalog's word when the registry cannot be reached."""
        try:
            return _records(await self._registry.replicas())
        except RegistryUnavailable:
            return _records(self._gateway.catalog.replicas)

    async def events(self, request: Request, caller: Principal) -> Response:
        after = _query_int(request, "after", 0)
        limit = min(_query_int(request, "limit", self._config.max_events), self._config.max_events)
        return _records(await self._registry.events(after, limit))

    async def activation(self, request: Request, caller: Principal) -> Response:
        """How far an activation is; waits up to `wait_s` for it to end."""
        activation_id = _digits(request.path_params["activation_id"], "activation_id")
        wait_s = _query_seconds(request, "wait_s")
        activation = await self._registry.activation(activation_id)
        return _record(await self._wait(activation, min(wait_s, self._config.activation_wait_s)))

    def _check_not_base(self, name: str) -> None:
        catalog = self._gateway.catalog
        own_id = None if catalog.base is None else catalog.base.base_id
        if name in (*catalog.base_names, own_id, BASE_LABEL):
            raise Conflict(f"{name!r} names the base model; choose another name for the adapter")

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._config.requests.max_body_bytes)

    async def _activated(self, activation: Activation, wait: bool) -> Response:
        return _record(await self._wait(activation, self._config.activation_wait_s) if wait else activation)

    async def _wait(self, activation: Activation, timeout_s: float) -> Activation:
        if activation.state not in UNDER_WAY or timeout_s <= 0:
            return activation
        ended = await self._registry.wait_activation(activation.activation_id, timeout_s)
        if ended.state is ActivationState.DONE and ended.staged_after_s is not None:
            self._gateway.metrics.propagated(ended.staged_after_s)
        return ended


def _record(record: BaseModel, status: int = 200) -> Response:
    return JSONResponse(record.model_dump(mode="json"), status)


def _records(records: Any) -> Response:
    return JSONResponse({"object": "list", "data": [record.model_dump(mode="json") for record in records]})


def _name(request: Request) -> str:
    """The path's adapter name; raises InvalidName for anything outside the grammar, path-like names above all."""
    name = str(request.path_params["name"])
    if not is_adapter_name(name):
        raise InvalidName(
            f"adapter name {name[:80]!r} is not allowed; allowed: 1 to 64 letters, digits, '.', '_' and '-', "
            "a letter or digit at both ends, no '..'",
            "name",
        )
    return name


def _alias(alias: str) -> str:
    if re.fullmatch(ALIAS_PATTERN[1:-1], alias) is None:
        raise InvalidName(
            f"alias {alias[:80]!r} is not allowed; allowed: 1 to 32 lower-case letters, digits, '_' and '-', "
            f"a letter first (the default alias is {LIVE_ALIAS!r})",
            "alias",
        )
    return alias


def _number(request: Request) -> int:
    return _digits(request.path_params["number"], "version")


def _digits(text: str, param: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise BadRequest(f"{param} is {text[:80]!r}; allowed: a whole number", param)
    return int(text)


def _query_int(request: Request, param: str, default: int) -> int:
    text = request.query_params.get(param)
    return default if text is None else _digits(text, param)


def _query_seconds(request: Request, param: str) -> float:
    text = request.query_params.get(param, "0")
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII) is None:
        raise BadRequest(f"{param} is {text[:80]!r}; allowed: seconds, 0 or more", param)
    return float(text)


def _flags(given: Any, defaults: dict[str, bool]) -> dict[str, bool]:
    """Boolean parameters by name; raises BadRequest for unknown names and values."""
    flags = dict(defaults)
    for name, text in given.items():
        if name not in defaults:
            raise BadRequest(f"unknown parameter: '{name[:80]}'", name[:80], "unknown_parameter")
        if text not in ("true", "false"):
            raise BadRequest(f"{name} is {text[:80]!r}; allowed: 'true' or 'false'", name)
        flags[name] = text == "true"
    return flags
