"""Which keys a canary takes: the same ones in every gateway, and as its weight grows only more of them.

A key's place is a number in [0, 1) that depends on adapter, tenant and key alone; the canary takes the places below its
weight. Keys that differ by a number (`user-17`) are spread by it: their places follow the sequence n / phi mod 1, which
fills the interval more evenly than chance (L. Kuipers, H. Niederreiter, "Uniform Distribution of Sequences", 1974,
chapter 2.3), so of a few hundred users in a row the share is right to within about two of them. Other keys fall at
random: the share of k of them has the standard deviation sqrt(weight * (1 - weight) / k).
"""

import hashlib
import re

INVERSE_PHI = 0x9E3779B97F4A7C15
"""2**64 / phi: n times this, modulo 2**64, is the place of n."""

RANGE = 1 << 64
MAX_KEY_CHARS = 256
_LAST_NUMBER = re.compile(r"([0-9]{1,9})[^0-9]*\Z")


def takes_canary(adapter: str, key: tuple[str, str], weight: float) -> bool:
    """Whether requests of (tenant, key) go to the adapter's canary of that weight."""
    return place(adapter, key) < weight


def place(adapter: str, key: tuple[str, str]) -> float:
    """In [0, 1)."""
    tenant, own = key
    if len(own) > MAX_KEY_CHARS:
        own = hashlib.sha256(own.encode(errors="surrogatepass")).hexdigest()
    found = _LAST_NUMBER.search(own)
    number, rest = (0, own) if found is None else (int(found[1]), f"{own[: found.start(1)]}\0{own[found.end(1) :]}")
    named = f"{adapter}\0{tenant}\0{rest}".encode(errors="surrogatepass")
    start = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest())
    return ((start + number * INVERSE_PHI) % RANGE >> 11) / (1 << 53)
