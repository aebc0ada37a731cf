"""Pictures of the dashboard in `docs/images`: the page in Chromium, over a fleet in this process and real traffic.

    python -m benchmarks.dashboard_shots [idle busy thrashing rollout noisy]

The base model sleeps instead of computing; everything else is what serves: registry, engines, slots, queues, gateway.
"""

import argparse
import asyncio
import json
import struct
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch

from benchmarks.dashboard_fleet import Running, Shape, dashboard_fleet
from registry.types import Scope
from tests.services.chromium import Browser, Page, running_browser

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
TEAMS = {
    "acme-legal": ("contract-review", "nda-check", "clause-finder"),
    "globex-support": ("support-en", "support-de", "support-fr", "triage"),
    "initech-data": ("sql-writer", "chart-titles", "schema-notes"),
    "umbrella-claims": ("claims-intake", "claims-letters"),
    "hooli-hr": ("job-ads", "onboarding"),
}
ADAPTERS = [name for names in TEAMS.values() for name in names]
WIDTH, HEIGHT = 1440, 1120
SIGNATURE = b"\x89PNG\r\n\x1a\n"


async def idle(running: Running) -> None:
    """Nobody calls."""
    await asyncio.sleep(6)


async def busy(running: Running) -> None:
    """Every team calls its own adapters, and there are slots for all of them."""
    for tenant, names in TEAMS.items():
        running.traffic.steady(tenant, names, clients=5, max_tokens=32, pause_s=0.6)
    await asyncio.sleep(50)


async def noisy(running: Running) -> None:
    """As busy, and one tenant sends far more than it can be served."""
    for tenant, names in TEAMS.items():
        running.traffic.steady(tenant, names, clients=4, max_tokens=32, pause_s=0.5)
    await asyncio.sleep(25)
    running.traffic.steady("initech-data", TEAMS["initech-data"], clients=90, max_tokens=64)
    await asyncio.sleep(25)


async def thrashing(running: Running) -> None:
    """More adapters are in use than there are slots."""
    running.traffic.steady("acme-legal", ADAPTERS[:3], clients=6, max_tokens=16, pause_s=0.4)
    await asyncio.sleep(25)
    for place, tenant in enumerate(TEAMS):
        own_first = ADAPTERS[3 * place :] + ADAPTERS[: 3 * place]
        running.traffic.steady(tenant, own_first, clients=5, max_tokens=8, pause_s=0.1)
    await asyncio.sleep(25)


async def rollout(running: Running) -> None:
    """A canary takes a fifth, and a new version waits for replicas, one of which is slow to stage."""
    for tenant, names in TEAMS.items():
        running.traffic.steady(tenant, names, clients=4, max_tokens=32, pause_s=0.6)
    number = await running.push("support-en", "globex-support", activate=False)
    await running.fleet.registry.canary("support-en", number, 0.2, alias="live", actor="globex-support")
    await running.push("nda-check", "acme-legal")
    await asyncio.sleep(30)
    running.hold_staging("replica-1")
    await running.push("sql-writer", "initech-data")
    await asyncio.sleep(9)


STATES: dict[str, tuple[Callable[[Running], Awaitable[None]], Shape, bool]] = {
    "idle": (idle, Shape(), False),
    "busy": (busy, Shape(), True),
    "noisy": (noisy, Shape(num_replicas=2, max_num_seqs=12), False),
    "thrashing": (thrashing, Shape(num_replicas=2, max_slots=3), True),
    "rollout": (rollout, Shape(), False),
}
"""What happens, in which fleet, and whether there is a dark picture too."""


FOUND = "document.querySelector('.finding b').textContent"
SAYS = {"noisy": "Look", "thrashing": "Trouble"}
"""The word in front of what stands out; elsewhere nothing does."""


@asynccontextmanager
async def set_up(shape: Shape) -> AsyncIterator[Running]:
    """A fleet with teams, keys and adapters; traffic ends before the fleet does."""
    with tempfile.TemporaryDirectory(prefix="lf-shots-") as folder:
        async with dashboard_fleet(Path(folder), shape) as running:
            await running.add_tenant("operations", Scope.ADMIN)
            for tenant in TEAMS:
                await running.add_tenant(tenant)
            for tenant, names in TEAMS.items():
                for name in names:
                    await running.push(name, tenant)
                    await running.fleet.registry.set_callers(name, ("*",), actor=tenant)
            await running.wait_live(ADAPTERS)
            try:
                yield running
            finally:
                await running.traffic.stop()


async def open_page(browser: Browser, running: Running, *, dark: bool = False, width: int = WIDTH) -> Page:
    page = await browser.new_page(width=width, height=HEIGHT, dark=dark)
    await page.before_all(f"sessionStorage.setItem('lorafleet-key', {json.dumps(running.keys['operations'])})")
    await page.open(f"{running.url}/dashboard")
    await page.until("document.querySelector('#main')?.getAttribute('aria-busy') === 'false'")
    return page


async def shoot(browser: Browser, state: str) -> None:
    drive, shape, has_dark = STATES[state]
    async with set_up(shape) as running:
        page = await open_page(browser, running)
        await drive(running)
        await page.until(f"{FOUND} === {json.dumps(SAYS.get(state, 'Calm'))}")
        await keep(page, state)
        if has_dark:
            await page.prefer("dark")
            await asyncio.sleep(1)
            await keep(page, f"{state}-dark")
        if state == "noisy":
            await page.resize(390, 844, scale=2)
            await asyncio.sleep(1)
            await keep(page, f"{state}-phone")
        assert page.errors == [], page.errors
        print(
            state,
            json.dumps(await page.run("[...document.querySelectorAll('.finding span')].map((e) => e.textContent)")),
        )


async def keep(page: Page, name: str) -> None:
    """A PNG of what is in sight; the browser compresses in haste, so it is done again."""
    path = IMAGES / f"dashboard-{name}.png"
    await page.picture(path)
    path.write_bytes(packed(path.read_bytes()))
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def packed(png: bytes) -> bytes:
    """The same picture with its pixels compressed as well as zlib can, and without what is not needed to show it."""
    kept, pixels, place = [], b"", len(SIGNATURE)
    while place < len(png):
        (size,) = struct.unpack(">I", png[place : place + 4])
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + size]
        pixels += data if kind == b"IDAT" else b""
        kept += [(kind, data)] if kind == b"IHDR" else []
        place += size + 12
    chunks = [*kept, (b"IDAT", zlib.compress(zlib.decompress(pixels), 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(*each) for each in chunks)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


async def main(states: list[str]) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    async with running_browser() as browser:
        for state in states:
            await shoot(browser, state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", nargs="*", default=[], help=f"of {', '.join(STATES)}; all when omitted")
    chosen = parser.parse_args().states or list(STATES)
    unknown = [state for state in chosen if state not in STATES]
    if unknown:
        sys.exit(f"no such state: {', '.join(unknown)}; there are {', '.join(STATES)}")
    torch.set_num_threads(1)
    with suppress(KeyboardInterrupt):
        asyncio.run(main(chosen))
