"""Uploads: files or an archive as multipart, or the name of a source as JSON; and the template that they should fit."""

from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import Response

from registry.errors import Conflict
from registry.types import AdapterSource, PushResult
from router.answers import answer, settled
from router.auth import Principal
from router.gateway import Gateway
from router.metrics import BASE_LABEL
from router.params import adapter_name, flags_of
from router.parsing import parse_body, read_body
from router.schemas import SourceBody
from router.uploads import receive_upload

FLAGS = {"activate": True, "wait": True}


class UploadApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry
        self._config = gateway.config

    async def push(self, request: Request, caller: Principal) -> Response:
        """201 for new content, 200 for content that this name already has."""
        name = adapter_name(request)
        check_not_base(self._gateway, name)
        take = self._push_source if is_json(request) else self._push_files
        result, wait = await take(request, name, caller.tenant)
        if result.activation is not None and wait:
            activation = await settled(self._gateway, result.activation, self._config.activation_wait_s)
            result = result.model_copy(update={"activation": activation})
        return answer(result, 201 if result.created else 200)

    async def _push_files(self, request: Request, name: str, tenant: str) -> tuple[PushResult, bool]:
        flags = flags_of(request.query_params, FLAGS)
        async with receive_upload(request, self._config.uploads) as upload:
            flags = flags_of(upload.fields, flags)
            result = await self._registry.push(name, upload.files, owner=tenant, activate=flags["activate"])
        return result, flags["wait"]

    async def _push_source(self, request: Request, name: str, tenant: str) -> tuple[PushResult, bool]:
        flags_of(request.query_params, {})
        body = parse_body(SourceBody, await read_body(request.scope, request.receive, self._config.requests))
        source = AdapterSource(url=body.source, revision=body.revision)
        result = await self._registry.push_source(name, source, owner=tenant, activate=body.activate)
        return result, body.wait

    async def template(self, request: Request, caller: Principal) -> Response:
        """What a training run needs to know of this fleet."""
        return answer(await self._registry.template())


def is_json(request: Request) -> bool:
    kind, _ = parse_options_header(request.headers.get("content-type", ""))
    return kind == b"application/json"


def check_not_base(gateway: Gateway, name: str) -> None:
    """Raises Conflict for a name of the base model."""
    catalog = gateway.catalog
    own_id = None if catalog.base is None else catalog.base.base_id
    if name in (*catalog.base_names, own_id, BASE_LABEL):
        raise Conflict(f"{name!r} names the base model; choose another name for the adapter")
