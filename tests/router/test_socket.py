"""The application on a real socket: a stream arrives piece by piece, and closing the connection aborts it."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from replica.messages import GenerateRequest, TokenChunk
from router.config import RequestLimits, RouterConfig
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


BODY = json.dumps({"model": "legal", "prompt": "x", "stream": True, "max_tokens": 100}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
PIECE = ids_of("word " * 400)
MAX_BUFFERED_BYTES = 48 << 20
"""What kernel and server may hold for one client that does not read; a kernel's socket buffers alone take some."""


@pytest.mark.parametrize("bytes_a_time", [0, 3])
async def test_stream_of_one_that_hardly_reads_is_ended_and_what_is_kept_for_it_is_bounded(bytes_a_time: int) -> None:
    num_sent = 0

    def endless(replica_id: str, request: GenerateRequest) -> Iterator[tuple[TokenChunk, ...]]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield (TokenChunk(request.request_id, 0, PIECE),)

    limits = RequestLimits(send_timeout_s=0.5)
    async with running(RouterConfig(requests=limits)) as stack:
        stack.fleet.script = endless  # type: ignore[assignment]
        async with served(stack) as url:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", urlsplit(url).port))
                client.sendall(HEAD % len(BODY) + BODY)
                client.setblocking(False)
                async with asyncio.timeout(60):
                    while not stack.fleet.closed:
                        await asyncio.sleep(0.05)
                        with suppress(BlockingIOError):
                            client.recv(bytes_a_time)
                assert stack.gateway.admission.num_in_flight == 0
                assert num_sent * len(PIECE) < MAX_BUFFERED_BYTES
                body = {"model": "legal", "prompt": "x", "max_tokens": 1}
                stack.fleet.script = lambda replica_id, request: [
                    (TokenChunk(request.request_id, 0, ids_of("hi"), finish_reason="length"),)
                ]
                async with httpx.AsyncClient(trust_env=False) as http:
                    assert (await http.post(f"{url}/v1/completions", json=body)).status_code == 200


async def test_body_that_drips_is_refused_after_its_time() -> None:
    async with running(RouterConfig(requests=RequestLimits(body_timeout_s=0.3))) as stack, served(stack) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(HEAD % len(BODY))
        async with asyncio.timeout(60):
            answer = asyncio.create_task(reader.readuntil(b"body_timeout"))
            for byte in BODY[:-1]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if answer.done():
                    break
            assert (await answer).startswith(b"HTTP/1.1 408 ")
        writer.close()
