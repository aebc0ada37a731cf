"""The application on a real socket: a stream arrives piece by piece, and closing the connection aborts it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn

from replica.messages import TokenChunk
from tests.router.support import Stack, ids_of, running


@asynccontextmanager
async def served(stack: Stack) -> AsyncIterator[str]:
    config = uvicorn.Config(stack.app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def test_first_token_arrives_before_the_last_and_closing_aborts() -> None:
    async with running() as stack:
        stack.fleet.hang = True
        stack.fleet.script = lambda replica_id, request: [(TokenChunk(request.request_id, 0, ids_of("hi")),)]
        async with served(stack) as url, httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "legal", "prompt": "x", "stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200
                line = await anext(response.aiter_lines())
                assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == "hi"
                assert stack.fleet.num_open == 1
            async with asyncio.timeout(5):
                while stack.fleet.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert len(stack.fleet.closed) == 1


async def test_stream_whose_first_message_has_no_text_is_whole() -> None:
    async with running() as stack:
        pieces = [(token_id,) for token_id in ids_of("é")]
        stack.fleet.script = lambda replica_id, request: [
            (TokenChunk(request.request_id, 0, piece, finish_reason="stop" if i else None),)
            for i, piece in enumerate(pieces)
        ]
        async with served(stack) as url, httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "legal", "prompt": "x", "stream": True}
            text = (await http.post(f"{url}/v1/completions", json=body)).text
            assert "\\u00e9" in text
            assert text.endswith("data: [DONE]\n\n")
