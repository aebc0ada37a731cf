"""What do 200 slow clients do to normal ones?

    python benchmarks/slow_clients.py

The gateway's application over fakes, under uvicorn on a real socket. A quarter of the slow clients send their headers
byte by byte, a quarter their body, a quarter read nothing of an endless stream and a quarter a few bytes a second, both
with a small socket buffer; whoever is cut off comes again. Normal ones ask one after another; blocks with and without
slow ones alternate.
"""

import argparse
import asyncio
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from benchmarks.tenant_engine import quantile  # noqa: E402
from replica.messages import GenerateRequest, TokenChunk  # noqa: E402
from router.dispatch import closing  # noqa: E402
from tests.router.fakes import FakeFleet, Message, one_choice  # noqa: E402
from tests.router.support import ids_of, running  # noqa: E402
from tests.router.test_socket import served  # noqa: E402

BODY = b'{"model": "legal", "prompt": "x", "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
DRIP_S = 0.5
READ_BYTES = 3
PIECE, PIECE_S = ids_of("word " * 4), 0.2


async def slow_client(host: str, port: int, kind: int) -> None:
    """Sends its request a byte every `DRIP_S` from some point on, or hardly reads, until it is cancelled."""
    head = HEAD % len(BODY)
    whole, at_once = head + BODY, (0, len(head), len(head) + len(BODY), len(head) + len(BODY))[kind]
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, port))
            await loop.sock_sendall(sock, whole[:at_once])
            for byte in whole[at_once:]:
                await loop.sock_sendall(sock, bytes([byte]))
                await asyncio.sleep(DRIP_S)
            while kind == 2 or await loop.sock_recv(sock, READ_BYTES):  # noqa: ASYNC110 (a pace, no event)
                await asyncio.sleep(DRIP_S)
        await asyncio.sleep(DRIP_S)


async def drip(url: str, number: int) -> None:
    """Be `number` slow clients for ever."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    await asyncio.gather(*(slow_client(parts.hostname, parts.port, index % 4) for index in range(number)))


@asynccontextmanager
async def slow_clients(url: str, number: int) -> AsyncIterator[None]:
    """In a process of their own, so that what they cost themselves is not measured."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--slow", str(number), "--drip", url)
    try:
        await asyncio.sleep(8)
        yield
    finally:
        process.kill()
        await process.wait()


async def block(url: str, num_requests: int) -> list[float]:
    """Milliseconds that each of the normal requests took."""
    took_ms = []
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        for _ in range(num_requests):
            started_s = time.perf_counter()
            response = await http.post(f"{url}/v1/completions", json={"model": "legal", "prompt": "hello"})
            assert response.status_code == 200, response.text
            took_ms.append(1e3 * (time.perf_counter() - started_s))
    return took_ms


def script(replica_id: str, request: GenerateRequest) -> Iterable[Message]:
    """A word for normal clients, a stream without end for slow ones."""
    if is_slow(request):
        while True:
            yield (TokenChunk(request.request_id, 0, PIECE),)
    yield from one_choice(request.request_id, [ids_of("hello")])


def is_slow(request: GenerateRequest) -> bool:
    return len(request.prompt) < 4


def pace(fleet: FakeFleet) -> None:
    """Have the streams of slow clients come as a replica would send them, a piece every `PIECE_S`."""
    at_once = fleet.generate

    async def generate(replica_id: str, request: GenerateRequest) -> AsyncIterator[Message]:
        async with closing(at_once(replica_id, request)) as messages:
            async for message in messages:
                yield message
                if is_slow(request):
                    await asyncio.sleep(PIECE_S)

    fleet.generate = generate  # type: ignore[method-assign]


async def measure(num_slow: int, num_requests: int, num_rounds: int) -> dict[str, float]:
    alone, beside = list[list[float]](), list[list[float]]()
    async with running() as stack, served(stack) as url:
        stack.fleet.script = script
        pace(stack.fleet)
        await block(url, num_requests)
        for _ in range(num_rounds):
            alone.append(await block(url, num_requests))
            async with slow_clients(url, num_slow):
                beside.append(await block(url, num_requests))
    found = {
        f"{name}_p{q}_ms": round(quantile([*chain(*blocks)], q / 100), 2)
        for name, blocks in (("alone", alone), ("beside", beside))
        for q in (50, 99)
    }
    ratios = [quantile(more, 0.99) / quantile(less, 0.99) for less, more in zip(alone, beside, strict=True)]
    return found | {"p99_ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drip", metavar="URL", help="only be the slow clients of that server")
    options = parser.parse_args()
    if options.drip:
        asyncio.run(drip(options.drip, options.slow))
    results = asyncio.run(measure(options.slow, options.requests, options.rounds))
    print(results)
    print(save("slow_clients", str(__doc__), vars(options), results))


if __name__ == "__main__":
    main()
