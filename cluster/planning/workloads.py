"""Request streams to simulate: which adapter is asked for when, with how many tokens. All are drawn from a seed."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GRID_POINTS = 2048
SHORTEST_TOKENS, LONGEST_TOKENS = 8, 512
"""Prompts and outputs are uniform between the two, as in S-LoRA's synthetic traces (Sheng et al., 2023)."""


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival; the four arrays have one entry a request."""

    name: str
    num_adapters: int
    at_s: Floats
    adapters: Ints
    """Index of the adapter, 0 to `num_adapters` - 1."""
    prompt_tokens: Ints
    output_tokens: Ints

    @property
    def num_requests(self) -> int:
        return len(self.at_s)

    @property
    def duration_s(self) -> float:
        return float(self.at_s[-1]) if len(self.at_s) else 0.0

    def names(self) -> list[str]:
        """The adapters' names, by index."""
        return [adapter_name(index) for index in range(self.num_adapters)]


def adapter_name(index: int) -> str:
    return f"adapter-{index:05}"


def zipf_weights(num_adapters: int, exponent: float) -> Floats:
    """Shares that sum to 1; adapter 0 is the most popular."""
    weights = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def zipf(num_requests: int, rate: float, num_adapters: int, exponent: float, seed: int) -> Workload:
    """W4: Poisson arrivals at `rate` a second, adapters Zipf-distributed."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1 / rate, num_requests))
    adapters = random.choice(num_adapters, num_requests, p=zipf_weights(num_adapters, exponent))
    return _with_lengths(f"zipf {exponent:g}", num_adapters, at_s, adapters, random)


def diurnal(num_requests: int, peak_rate: float, num_adapters: int, seed: int) -> Workload:
    """W5: two days of a sinusoid between a fifth of the peak and the peak; who is popular rotates through the day."""
    random = np.random.default_rng(seed)
    shape = 0.6 - 0.4 * np.cos(np.linspace(0, 4 * math.pi, GRID_POINTS))
    at_s, phase = _modulated(num_requests, peak_rate, shape, random)
    ranks = random.choice(num_adapters, num_requests, p=zipf_weights(num_adapters, 1.0))
    awake = (2 * phase * num_adapters).astype(np.int64)
    return _with_lengths("diurnal", num_adapters, at_s, (ranks * 7 + awake // 4) % num_adapters, random)


def flash_crowd(num_requests: int, peak_rate: float, num_adapters: int, seed: int) -> Workload:
    """W5: steady Zipf traffic; in the middle fifth one adapter from the tail adds as much traffic as all others."""
    random = np.random.default_rng(seed)
    grid = np.linspace(0, 1, GRID_POINTS)
    in_crowd = (grid >= 0.4) & (grid < 0.6)
    at_s, phase = _modulated(num_requests, peak_rate, np.where(in_crowd, 1.0, 0.5), random)
    adapters = random.choice(num_adapters, num_requests, p=zipf_weights(num_adapters, 1.0))
    joins = (phase >= 0.4) & (phase < 0.6) & (random.random(num_requests) < 0.5)
    return _with_lengths("flash crowd", num_adapters, at_s, np.where(joins, num_adapters - 1, adapters), random)


def churn(num_requests: int, rate: float, num_adapters: int, seed: int) -> Workload:
    """W5: adapters appear and fade. A quarter of them is in use at a time, and over the run each is once."""
    random = np.random.default_rng(seed)
    at_s, phase = _modulated(num_requests, rate, np.ones(GRID_POINTS), random)
    num_active = max(1, num_adapters // 4)
    first = (phase * (num_adapters - num_active)).astype(np.int64)
    ranks = random.choice(num_active, num_requests, p=zipf_weights(num_active, 1.0))
    scattered = (ranks * 17) % num_active if math.gcd(17, num_active) == 1 else ranks
    return _with_lengths("appear and fade", num_adapters, at_s, first + scattered, random)


def with_lengths(workload: Workload, prompt_tokens: int, output_tokens: int, seed: int) -> Workload:
    """The same requests with lengths uniform from 1 to twice these means."""
    random, number = np.random.default_rng(seed), workload.num_requests
    return replace(
        workload,
        prompt_tokens=random.integers(1, 2 * prompt_tokens, number, endpoint=False),
        output_tokens=random.integers(1, 2 * output_tokens, number, endpoint=False),
    )


def _modulated(
    num_requests: int, peak_rate: float, shape: Floats, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Arrivals of a Poisson process whose rate is `peak_rate` x `shape` over the run, and their phase in it (0 to 1).

    By inversion of the cumulated rate (Cinlar, 1975).
    """
    unit = np.cumsum(random.exponential(1.0, num_requests))
    cumulated = np.concatenate(([0.0], np.cumsum((shape[1:] + shape[:-1]) / 2)))
    phase = np.interp(unit / unit[-1], cumulated / cumulated[-1], np.linspace(0, 1, len(shape)))
    duration_s = num_requests / (peak_rate * float(shape.mean()))
    return phase * duration_s, phase


def _with_lengths(name: str, num_adapters: int, at_s: Floats, adapters: Ints, random: np.random.Generator) -> Workload:
    lengths = random.integers(SHORTEST_TOKENS, LONGEST_TOKENS, (2, len(at_s)))
    return Workload(name, num_adapters, at_s, adapters, lengths[0], lengths[1])
