"""What do 200 slow clients do to normal ones?

    python benchmarks/slow_clients.py

The gateway's application over fakes, under uvicorn on a real socket. Of the slow clients some send their headers byte
by byte, some their body, some read nothing of an endless stream and some a few bytes a second, both with a small socket
buffer; whoever is cut off comes again. Normal ones ask one after another. Blocks take turns: without other clients;
with slow senders alone, held against none; with as many quick readers of such streams as there are slow ones, whose
pieces cost the gateway what any stream's do; and with all four kinds of slow ones, held against these.
"""

import argparse
import asyncio
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any
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
SETTLE_S = 8.0


class Kind(StrEnum):
    """What another client does all the time."""

    DRIPS_HEAD = "drips head"
    DRIPS_BODY = "drips body"
    READS_NOTHING = "reads nothing"
    READS_LITTLE = "reads little"
    READS_ALL = "reads all"


DRIPPING = (Kind.DRIPS_HEAD, Kind.DRIPS_BODY)
SLOW_READERS = (Kind.READS_NOTHING, Kind.READS_LITTLE)
OTHERS: dict[str, tuple[Kind, ...]] = {
    "none": (),
    "dripping": (*DRIPPING, *DRIPPING),
    "quick readers": (Kind.READS_ALL, Kind.READS_ALL),
    "slow": (*DRIPPING, *SLOW_READERS),
}
"""Beside whom the normal ones ask; each kind named is a quarter of `--slow`."""

BASELINES = {"dripping": "none", "slow": "quick readers"}


async def other_client(host: str, port: int, kind: Kind) -> None:
    """Sends its request a byte every `DRIP_S` from some point on, or reads as `kind` says, until it is cancelled."""
    head = HEAD % len(BODY)
    whole = head + BODY
    at_once = {Kind.DRIPS_HEAD: 0, Kind.DRIPS_BODY: len(head)}.get(kind, len(whole))
    size, pause_s = (1 << 16, 0.0) if kind is Kind.READS_ALL else (READ_BYTES, DRIP_S)
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
            while kind is Kind.READS_NOTHING or await loop.sock_recv(sock, size):  # noqa: ASYNC110 (a pace, no event)
                await asyncio.sleep(pause_s)
        await asyncio.sleep(DRIP_S)


async def be(kinds: Sequence[Kind], url: str, number: int) -> None:
    """Be so many clients of each of these kinds for ever."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    await asyncio.gather(*(other_client(parts.hostname, parts.port, kind) for kind in kinds for _ in range(number)))


@asynccontextmanager
async def beside(kinds: Sequence[Kind], url: str, number: int) -> AsyncIterator[None]:
    """In a process of their own, so that what they cost themselves is not measured."""
    if not kinds:
        yield
        return
    command = (sys.executable, __file__, "--url", url, "--slow", str(number), "--be", *kinds)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await asyncio.sleep(SETTLE_S)
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


async def measure(num_slow: int, num_requests: int, num_rounds: int) -> dict[str, Any]:
    took: dict[str, list[list[float]]] = {name: [] for name in OTHERS}
    async with running() as stack, served(stack) as url:
        stack.fleet.script = script
        pace(stack.fleet)
        await block(url, num_requests)
        for _ in range(num_rounds):
            for name, kinds in OTHERS.items():
                async with beside(kinds, url, num_slow // 4):
                    took[name].append(await block(url, num_requests))
    return {
        name: {f"p{q}_ms": round(quantile([*chain(*blocks)], q / 100), 2) for q in (50, 99)}
        | {f"p{q}_over_{each}": ratio(blocks, took[each], q) for q in (50, 99) for each in baselines(name)}
        for name, blocks in took.items()
    }


def baselines(name: str) -> list[str]:
    """What a set-up is held against; whatever it is, also against no other clients."""
    return [each for each in dict.fromkeys((BASELINES.get(name, "none"), "none")) if each != name]


def ratio(blocks: Sequence[list[float]], others: Sequence[list[float]], q: int) -> float:
    """The median over the rounds of one quantile over the other."""
    pairs = zip(blocks, others, strict=True)
    return round(statistics.median(quantile(more, q / 100) / quantile(less, q / 100) for more, less in pairs), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be", nargs="+", type=Kind, help="only be `--slow` clients of each of these kinds")
    parser.add_argument("--url", help="of the server, with --be")
    options = parser.parse_args()
    if options.be:
        asyncio.run(be(options.be, options.url, options.slow))
    results = asyncio.run(measure(options.slow, options.requests, options.rounds))
    for name, figures in results.items():
        print(name, figures)
    conditions = {"slow": options.slow, "requests": options.requests, "rounds": options.rounds, "piece_s": PIECE_S}
    print(save("slow_clients", str(__doc__), conditions, results))


if __name__ == "__main__":
    main()
