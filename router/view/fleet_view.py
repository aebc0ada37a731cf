"""The view of the fleet that everybody who looks shares: one scrape serves them all. While nobody looks it is idle."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from router.view.records import FleetReport, HistoryPoint
from router.view.report import Page, build_page, history_point
from router.view.sources import Gatherer, ViewSource, timed
from router.view.window import Sample, Samples

PERIOD_S = 1.0
"""A report is at least so old before the next one is made."""
MAX_SHARE = 0.1
"""Making reports takes at most this part of a processor; a larger fleet is looked at less often."""
MAX_PERIOD_S = 5.0
"""However large it is: the window of rates must hold two scrapes."""
RATE_WINDOW_S = 10.0
LATENCY_WINDOW_S = 60.0
NUM_POINTS = 300
FIRST_S = 1.0
"""Between the first scrape and the second one, without which there are no rates."""


class FleetView:
    """Makes reports when asked. `clock` is for tests."""

    def __init__(
        self,
        source: ViewSource,
        gateway: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gatherer = Gatherer(source)
        self._gateway = gateway
        self._clock = clock
        self._samples = Samples(RATE_WINDOW_S, LATENCY_WINDOW_S)
        self._points: deque[HistoryPoint] = deque(maxlen=NUM_POINTS)
        self._page: Page | None = None
        self._made_at_s = float("-inf")
        self._cost_s = 0.0
        """Processor time of the last report; members' texts cost about as much to write as to read."""
        self._making = asyncio.Lock()
        self.num_scrapes = 0

    def __repr__(self) -> str:
        return f"FleetView({self.num_scrapes} scrapes, {self._samples!r}, every {self.period_s:.1f} s)"

    @property
    def period_s(self) -> float:
        """How long a report counts as new."""
        return min(MAX_PERIOD_S, max(PERIOD_S, self._cost_s / MAX_SHARE))

    async def report(self, *, limit: int, search: str = "", since_s: float = 0.0, with_events: bool) -> FleetReport:
        """The fleet now, with at most `limit` adapters that fit `search`, and the history after `since_s`."""
        page = await self._newest()
        points = [point for point in self._points if point.at_s > since_s]
        return page.answer(limit, search, points, with_events=with_events, period_s=self.period_s)

    async def _newest(self) -> Page:
        """The last page while it is new, else another one; those who ask meanwhile share it."""
        async with self._making:
            now_s = self._clock()
            if self._page is None or now_s - self._made_at_s >= self.period_s:
                if now_s - self._made_at_s > RATE_WINDOW_S:
                    await self._make()
                    await asyncio.sleep(FIRST_S)
                self._page = await self._make()
                self._points.append(history_point(self._page.report))
            return self._page

    async def _make(self) -> Page:
        moment = await self._gatherer.gather()
        self._made_at_s = self._clock()
        self._samples.add(Sample(self._made_at_s, moment.readings))
        self.num_scrapes += 1
        windows = self._samples.short(), self._samples.long()
        page, cost_s = await asyncio.to_thread(timed, lambda: build_page(moment, *windows, self._gateway))
        self._cost_s = 2 * moment.cost_s + cost_s
        return page
