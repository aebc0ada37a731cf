"""What do 200 slow clients do to normal ones?

    python benchmarks/slow_clients.py

The gateway's application over fakes, under uvicorn on a real socket. A third of the slow clients send their headers
byte by byte, a third their body, a third read nothing of a (short) stream. Normal ones ask one after another; blocks
with and without slow ones alternate.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from benchmarks.tenant_engine import quantile  # noqa: E402
from tests.router.fakes import one_choice  # noqa: E402
from tests.router.support import ids_of, running  # noqa: E402
from tests.router.test_socket import served  # noqa: E402

BODY = b'{"model": "legal", "prompt": "x", "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
DRIP_S = 0.5


async def slow_client(host: str, port: int, kind: int) -> None:
    """Sends its request a byte every `DRIP_S` from some point on, or reads nothing, until it is cancelled."""
    _, writer = await asyncio.open_connection(host, port, limit=1)
    try:
        head = HEAD % len(BODY)
        at_once = (b"", head, head + BODY)[kind]
        writer.write(at_once)
        for byte in (head + BODY)[len(at_once) :]:
            writer.write(bytes([byte]))
            await asyncio.sleep(DRIP_S)
        await asyncio.Event().wait()
    except OSError:
        """The server had enough of it."""
    finally:
        writer.close()


async def drip(url: str, number: int) -> None:
    """Be `number` slow clients for ever."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    await asyncio.gather(*(slow_client(parts.hostname, parts.port, index % 3) for index in range(number)))


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


async def measure(num_slow: int, num_requests: int, num_rounds: int) -> dict[str, float]:
    alone, beside = list[list[float]](), list[list[float]]()
    async with running() as stack, served(stack) as url:
        stack.fleet.script = lambda replica_id, request: one_choice(request.request_id, [ids_of("hello")])
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
