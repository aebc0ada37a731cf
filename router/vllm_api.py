"""vLLM's two endpoints for adapters, so that control planes made for it work here: load from a path, and unload.

Fields, texts and status codes are those of vLLM's `OpenAIServingModels.load_lora_adapter` and `unload_lora_adapter`
(vllm/entrypoints/openai/models/serving.py, commit 00153c8) where it answers right. What it answers with a 500, a bad
adapter above all, is this server's own error with every fault. The path must lie under `source_roots`; a load is done
when every replica has the adapter, and an unload drains.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from registry.errors import AdapterNotFound, Conflict, SourceNotFound
from registry.types import LIVE_ALIAS, Activation, ActivationState, AdapterRecord, AdapterSource, VersionState
from router.answers import settled
from router.auth import Principal
from router.gateway import Gateway
from router.ownership import own, see
from router.params import check_adapter_name
from router.parsing import parse_body, read_body
from router.schemas import Body
from router.upload_api import check_not_base

HUB_SCHEME = "hf://"
CAS_ATTEMPTS = 8
"""Loads of one name that are under way at once push each other's revision on."""


class LoadBody(Body):
    """POST /v1/load_lora_adapter. The path is a folder, an archive, or a URL of a source; `hf://owner/name@commit`."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter; `lora_int_id` is ignored, as in vLLM."""

    lora_name: str = ""
    lora_int_id: int | None = None


class AlreadyLoaded(Exception):
    """The name is live, or on its way to be, and the caller did not ask to replace it."""


class VllmApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry

    async def load(self, request: Request, caller: Principal) -> Response:
        body = parse_body(LoadBody, await self._read(request))
        if not body.lora_name or not body.lora_path:
            return refusal(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if body.is_3d_lora_weight:
            return refusal(400, "InvalidUserInput", "'is_3d_lora_weight' is not supported: expert LoRA is not served.")
        check_adapter_name(body.lora_name)
        check_not_base(self._gateway, body.lora_name)
        try:
            activation = await self._load(body, caller)
        except AlreadyLoaded:
            message = (
                f"The lora adapter '{body.lora_name}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True."
            )
            return refusal(400, "InvalidUserInput", message)
        except SourceNotFound:
            message = f"Loading lora {body.lora_name} failed: No adapter found for {body.lora_path[:200]}"
            return refusal(404, "NotFoundError", message)
        return await self._loaded(activation)

    async def _load(self, body: LoadBody, caller: Principal) -> Activation:
        """Store the adapter and ask that `live` move to it. Raises AlreadyLoaded, and what a push raises."""
        if not body.load_inplace and is_loaded(await self._record(body.lora_name, caller)):
            raise AlreadyLoaded
        result = await self._registry.push_source(
            body.lora_name, source_of(body.lora_path), owner=caller.tenant, activate=body.load_inplace
        )
        return result.activation or await self._claim(body.lora_name, result.version.number, caller.tenant)

    async def _claim(self, name: str, number: int, tenant: str) -> Activation:
        """Move `live` unless another load of the name was faster: the revision decides which one is."""
        for _ in range(CAS_ATTEMPTS):
            record = await self._registry.adapter(name)
            if is_loaded(record):
                raise AlreadyLoaded
            try:
                return await self._registry.activate(
                    name, LIVE_ALIAS, number, actor=tenant, expected_revision=record.revision
                )
            except Conflict:
                continue
        raise AlreadyLoaded

    async def _loaded(self, activation: Activation) -> Response:
        ended = await settled(self._gateway, activation, self._gateway.config.activation_wait_s)
        if ended.state in (ActivationState.DONE, ActivationState.FLIPPED):
            return PlainTextResponse(f"Success: LoRA adapter '{ended.name}' added successfully.")
        if ended.state is ActivationState.PENDING:
            message = f"'{ended.name}' is still being staged on {', '.join(ended.waiting_for)}"
            return refusal(503, "ServiceUnavailableError", message)
        return refusal(500, "InternalServerError", ended.error or f"the load was overtaken ({ended.state})")

    async def unload(self, request: Request, caller: Principal) -> Response:
        name = parse_body(UnloadBody, await self._read(request)).lora_name
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            return refusal(400, "InvalidUserInput", message)
        record = await self._record(name, caller)
        if record is None or not any(version.state is VersionState.ACTIVE for version in record.versions):
            return refusal(404, "NotFoundError", f"The lora adapter '{name[:200]}' cannot be found.")
        await own(self._registry, caller, name)
        await self._registry.retire(name, None, actor=caller.tenant)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _record(self, name: str, caller: Principal) -> AdapterRecord | None:
        """The adapter, None where there is none that the caller may know of."""
        try:
            await see(self._registry, caller, name)
            return await self._registry.adapter(name)
        except AdapterNotFound:
            return None

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._gateway.config.requests)


def is_loaded(record: AdapterRecord | None) -> bool:
    """Whether `live` points somewhere, or will when replicas have staged what is pending."""
    return record is not None and (LIVE_ALIAS in record.aliases or bool(record.pending))


def source_of(path: str) -> AdapterSource:
    """The source that a `lora_path` names."""
    if path.startswith(HUB_SCHEME):
        url, _, revision = path.partition("@")
        return AdapterSource(url=url, revision=revision or None)
    return AdapterSource(url=path)


def refusal(status: int, kind: str, message: str) -> Response:
    """vLLM's error body: the status stands in `code`."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
