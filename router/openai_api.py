"""The OpenAI endpoints: bodies in, answers and streams out. One function a stage."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.auth import Principal
from router.choice import Delta
from router.deadline import timeout_of
from router.formats import ChatFormat, CompletionFormat, Format, FullChoice
from router.gateway import Gateway, Generation
from router.journal import Arrival
from router.models import list_models, one_model
from router.parsing import parse_body, read_body
from router.schemas import ChatBody, CompletionBody, GenerationBody
from router.sse import EventStream, JsonAnswer

STICKY_HEADER = "x-lorafleet-sticky"
"""Requests with the same value get the same version while a canary stands."""


class OpenAiApi:
    """Handlers over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = gateway.config.requests

    async def models(self, request: Request, caller: Principal) -> Response:
        return JSONResponse({"object": "list", "data": list_models(self._gateway.catalog, caller.tenant)})

    async def model(self, request: Request, caller: Principal) -> Response:
        return JSONResponse(one_model(self._gateway.catalog, caller.tenant, request.path_params["model"]))

    async def chat_completions(self, request: Request, caller: Principal) -> Response:
        arrival = self._arrival(request)
        body = parse_body(ChatBody, await self._read(request))
        call = await self._gateway.chat_call(caller.tenant, body, request.headers.get(STICKY_HEADER))
        return self._respond(request, body, self._gateway.generation(call, arrival), ChatFormat(call))

    async def completions(self, request: Request, caller: Principal) -> Response:
        arrival = self._arrival(request)
        body = parse_body(CompletionBody, await self._read(request))
        call = await self._gateway.completion_call(caller.tenant, body, request.headers.get(STICKY_HEADER))
        return self._respond(request, body, self._gateway.generation(call, arrival), CompletionFormat(call))

    def _arrival(self, request: Request) -> Arrival:
        return self._gateway.journal.arrival(request.state.request_id, request.headers.get("traceparent"))

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._limits)

    def _respond(self, request: Request, body: GenerationBody, generation: Generation, shape: Format) -> Response:
        timeout_s = timeout_of(request.headers, self._limits.request_timeout_s)
        request.state.is_in_journal = True
        if body.stream:
            return EventStream(stream_events(generation, shape), timeout_s, self._limits.send_timeout_s)
        return JsonAnswer(lambda: full_answer(generation, shape), timeout_s)


async def stream_events(generation: Generation, shape: Format) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, one byte string a message of the replica."""
    begun = False
    async with aclosing(generation.deltas()) as messages:
        async for deltas in messages:
            data = shape.chunk(deltas[0]) if len(deltas) == 1 else _join(shape, deltas)
            if not begun:
                begun, data = True, shape.first() + data
            yield data
    yield shape.last(generation.num_tokens)


def _join(shape: Format, deltas: Sequence[Delta]) -> bytes:
    return b"".join([shape.chunk(delta) for delta in deltas])


async def full_answer(generation: Generation, shape: Format) -> dict[str, Any]:
    """The answer as one object."""
    choices = [FullChoice() for _ in range(generation.call.num_choices)]
    async with aclosing(generation.deltas()) as messages:
        async for deltas in messages:
            for delta in deltas:
                choices[delta.index].add(delta)
    return shape.full(choices, generation.num_tokens)
