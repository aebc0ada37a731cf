"""Limits of tenants at this gateway: how many prompts at once, how many prompts and tokens a minute.

Several gateways share each limit: `uses` says what this one holds and wants, `take` brings its parts. Where nothing is
shared every limit is this gateway's alone. Knows nothing of HTTP and of how the registry is reached.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from registry.types import Access, LimitShare, LimitUse, TenantLimits
from router.errors import TenantLimitReached
from router.limit_meters import COUNTERS, Meter
from router.sliding_window import Piece

FIRST_PART_S = 1.0
"""How long a request waits for this gateway's first part of a tenant's limit."""

NO_LIMITS = TenantLimits(weight=1.0)
WORDS = {
    "max_concurrent": "requests at once",
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
}


class Charge:
    """What one call was charged. `settle` corrects its tokens to what they were, once."""

    def __init__(self, meter: Meter | None, piece: Piece | None, num_tokens: int, clock: Callable[[], float]) -> None:
        self._meter = meter
        self._piece = piece
        self._num_tokens = num_tokens
        self._clock = clock

    def settle(self, num_tokens: int) -> None:
        """The call took `num_tokens` tokens in all."""
        meter, piece, charged = self._meter, self._piece, self._num_tokens
        self._meter = None
        if meter is None or piece is None:
            return
        if num_tokens <= charged:
            meter.counter.take_back(piece, charged - num_tokens)
        else:
            meter.counter.add(num_tokens - charged, self._clock())


class TenantGate:
    """Admits calls under the limits of their tenants."""

    def __init__(
        self,
        access: Callable[[], Access | None],
        *,
        shared: bool = False,
        refused: Callable[[str, str], None] = lambda tenant, limit: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access = access
        self._shared = shared
        self._refused = refused
        self._clock = clock
        self._meters: dict[str, dict[str, Meter]] = {}
        self._answered = asyncio.Event()
        self.news = asyncio.Event()
        """Set when a request waits for the registry's answer."""

    def __repr__(self) -> str:
        return f"TenantGate({self._meters!r})"

    @property
    def holds_any(self) -> bool:
        """Whether this gateway holds parts of limits that another one may need."""
        return bool(self._meters)

    def limits_of(self, tenant: str) -> TenantLimits:
        """What holds for a tenant, with the configuration's defaults."""
        access = self._access()
        return NO_LIMITS if access is None else access.limits.get(tenant, access.defaults)

    async def ready(self, tenant: str) -> None:
        """Wait until this gateway has its parts of the tenant's limits, or for `FIRST_PART_S`."""
        if all(meter.granted is not None for meter in self._of(tenant).values()):
            return
        self.news.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PART_S):
                while any(meter.granted is None for meter in self._of(tenant).values()):
                    await self._answered.wait()

    @contextmanager
    def admit(self, tenant: str, num_prompts: int, num_tokens: int) -> Iterator[Charge]:
        """Hold places for `num_prompts` prompts that may take `num_tokens` tokens in all; raises TenantLimitReached."""
        meters, now_s = self._of(tenant), self._clock()
        amounts = {limit: num_tokens if limit == "tokens_per_minute" else num_prompts for limit in meters}
        for limit, meter in meters.items():
            if not meter.has_room(amounts[limit], now_s):
                self._refuse(tenant, meter, amounts[limit], now_s)
        pieces = {limit: meter.counter.add(amounts[limit], now_s) for limit, meter in meters.items()}
        tokens = "tokens_per_minute"
        try:
            yield Charge(meters.get(tokens), pieces.get(tokens), num_tokens, self._clock)
        finally:
            if "max_concurrent" in meters:
                meters["max_concurrent"].counter.take_back(pieces["max_concurrent"], num_prompts)

    def _refuse(self, tenant: str, meter: Meter, amount: int, now_s: float) -> None:
        retry_after_s = meter.refuse(amount, now_s)
        self._refused(tenant, meter.limit)
        allowed = getattr(self.limits_of(tenant), meter.limit)
        message = f"this tenant's limit of {allowed} {WORDS[meter.limit]} is reached; retry in {retry_after_s} s"
        if amount > (allowed or 0):
            message = f"the request needs {amount}; this tenant's limit is {allowed} {WORDS[meter.limit]}"
        raise TenantLimitReached(message, meter.limit, retry_after_s)

    def _of(self, tenant: str) -> Mapping[str, Meter]:
        """The meters of the limits that the tenant has now."""
        limits = self.limits_of(tenant)
        wanted = {limit: getattr(limits, limit) for limit in COUNTERS if getattr(limits, limit) is not None}
        meters = self._meters.get(tenant, {})
        if wanted.keys() != meters.keys():
            meters = {limit: meters.get(limit) or Meter(limit, None) for limit in wanted}
            self._meters[tenant] = meters
        for limit, meter in meters.items():
            if not self._shared:
                meter.granted = wanted[limit]
            elif meter.granted is not None:
                meter.granted = min(meter.granted, wanted[limit])
        return meters

    def uses(self) -> tuple[LimitUse, ...]:
        """What this gateway holds and wants, of every limit where there is news. What it says it no longer holds it
        does not use from now on."""
        self.news.clear()
        now_s = self._clock()
        told = []
        for tenant in list(self._meters):
            limits = self.limits_of(tenant)
            for limit, meter in self._of(tenant).items():
                use = meter.use(tenant, getattr(limits, limit), now_s)
                if use is not None:
                    told.append(use)
            if not self._meters[tenant]:
                del self._meters[tenant]
        return tuple(told)

    async def wait_for_news(self, timeout_s: float) -> None:
        """Sleep until a request waits for the registry's answer, or for `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.news.wait()

    def take(self, shares: Sequence[LimitShare]) -> None:
        """The registry's answer to `uses`."""
        for share in shares:
            meter = self._meters.get(share.tenant, {}).get(share.limit)
            if meter is not None:
                meter.take(share)
        self._answered.set()
        self._answered = asyncio.Event()

    def keep_only(self, tenants: Iterable[str]) -> None:
        """Forget tenants that are gone, once nothing of theirs is in flight or within the minute."""
        now_s = self._clock()
        for tenant in self._meters.keys() - set(tenants):
            if all(meter.is_idle(now_s) for meter in self._meters[tenant].values()):
                del self._meters[tenant]
