"""Ratios of things that were measured side by side, round by round, and how sure they are."""

import math
import statistics
from collections.abc import Sequence

T_95 = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
    12: 2.201,
    15: 2.145,
    20: 2.093,
    30: 2.045,
    40: 2.023,
    60: 2.001,
    120: 1.98,
    400: 1.966,
}
"""Student's t for a two-sided 95 % interval, by the number of rounds."""


def ratio_of(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the rounds' ratios, and its 95 % interval; two rounds at least."""
    logs = [math.log(one / other) for one, other in zip(ours, others, strict=True)]
    num_rounds = max(count for count in T_95 if count <= len(logs))
    half = T_95[num_rounds] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
