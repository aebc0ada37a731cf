"""Records as HTTP answers, and waiting for an activation to end before answering with it."""

from collections.abc import Iterable

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from registry.types import UNDER_WAY, Activation
from router.gateway import Gateway


def answer(record: BaseModel, status: int = 200) -> Response:
    return JSONResponse(record.model_dump(mode="json"), status)


def answer_list(records: Iterable[BaseModel]) -> Response:
    return JSONResponse({"object": "list", "data": [record.model_dump(mode="json") for record in records]})


async def settled(gateway: Gateway, activation: Activation, timeout_s: float) -> Activation:
    """The activation when it has ended, or as it stands after `timeout_s` seconds."""
    if activation.state not in UNDER_WAY or timeout_s <= 0:
        return activation
    return await gateway.registry.wait_activation(activation.activation_id, timeout_s)


async def answer_activation(gateway: Gateway, activation: Activation, wait: bool) -> Response:
    """Answers when every gateway knows, or after `activation_wait_s` with what is still missing."""
    return answer(await settled(gateway, activation, gateway.config.activation_wait_s) if wait else activation)
