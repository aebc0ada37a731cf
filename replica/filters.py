"""What of a distribution may be drawn: top_k, top_p and min_p on unnormalised weights. Equal weights stay together.

Weights are float32 [rows, vocabulary] with the likeliest of each row at 1. On an asynchronous device nothing here
waits for it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from replica.device_link import DeviceLink
from replica.messages import SamplingParams

BLOCK = 128
"""Weights are summed in blocks of this many before they are scanned: a scan over a whole vocabulary is slow."""

NUM_WEIGHT_BITS = 30
"""The bit patterns of the floats from 0 to 1, which are in the order of the floats, fit in this many bits."""


def as_blocks(weights: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, BLOCK], the last block filled up with zeros."""
    missing = -weights.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, BLOCK)


def total(weights: torch.Tensor) -> torch.Tensor:
    """Float64 [rows]: each row's sum."""
    return as_blocks(weights).sum(dim=-1).sum(dim=-1, dtype=torch.float64)


def select(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows that `index`, ascending, names; no copy when it names them all."""
    return rows if len(index) == len(rows) else rows.index_select(0, index)


def drop_unlikely(weights: torch.Tensor, params: Sequence[SamplingParams], link: DeviceLink) -> None:
    """In place: no weight for what top_k, then top_p, then min_p leave out, row i by `params[i]`."""
    _keep_top_k(weights, params, link)
    floors = _nucleus_floors(weights, params, link)
    if any(each.min_p for each in params):
        least = link.send([each.min_p for each in params], weights.dtype)[:, None]
        floors = least if floors is None else torch.maximum(floors, least)
    if floors is not None:
        weights.masked_fill_(weights < floors, 0.0)


def _keep_top_k(weights: torch.Tensor, params: Sequence[SamplingParams], link: DeviceLink) -> None:
    """In place: no weight for what is less likely than the k-th likeliest, in the rows with `top_k`."""
    picked = [index for index, each in enumerate(params) if 0 < each.top_k < weights.shape[-1]]
    if picked:
        numbers = [params[index].top_k for index in picked]
        rows, last = link.send([picked, [number - 1 for number in numbers]], torch.int64)
        part = select(weights, rows)
        floor = part.topk(max(numbers), dim=-1).values.gather(-1, last[:, None])
        weights.index_copy_(0, rows, torch.where(part < floor, 0.0, part))


def _nucleus_floors(weights: torch.Tensor, params: Sequence[SamplingParams], link: DeviceLink) -> torch.Tensor | None:
    """[rows, 1]: the least weight inside each row's nucleus, 0 in rows without `top_p`; None when there are only such.

    The nucleus (Holtzman et al. 2020) is the likeliest tokens up to the one that reaches `top_p` of the whole: a
    token is in it when those above it weigh less than that.
    """
    picked = [index for index, each in enumerate(params) if each.top_p < 1]
    if not picked:
        return None
    rows = link.send(picked, torch.int64)
    part = select(weights, rows)
    goals = total(part) * link.send([params[index].top_p for index in picked], torch.float64)
    return weights.new_zeros(len(params), 1).index_copy_(0, rows, _search(part, goals, link)[:, None])


def _search(weights: torch.Tensor, goals: torch.Tensor, link: DeviceLink) -> torch.Tensor:
    if weights.device.type == "cuda":
        from replica.kernels.nucleus import nucleus_floors  # Triton exists beside CUDA only

        floors: torch.Tensor = nucleus_floors(weights, goals)
        return floors
    return floors_by_bits(weights, goals) if link.is_asynchronous else floors_by_sorting(weights, goals)


def floors_by_bits(weights: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    """For each row the least weight above which less than `goals` (float64 [rows]) lies; float32 [rows].

    Finds, bit by bit, the greatest float above which the goal is still reached: a fixed number of passes over the
    weights, without a look from the host. The next float is the floor.
    """
    below = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    for bit in reversed(range(NUM_WEIGHT_BITS)):
        trial = below + (1 << bit)
        above = torch.where(weights > trial.view(torch.float32), weights, 0.0)
        below.add_(above.sum(dim=-1, keepdim=True, dtype=torch.float64) >= goals[:, None], alpha=1 << bit)
    return (below + 1).view(torch.float32).squeeze(-1)


def floors_by_sorting(weights: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    """The same for weights on the host, where sorting what can be in a nucleus at all is by far cheaper."""
    floors = [
        _floor_of_row(*each) for each in zip(weights.numpy(), goals.tolist(), total(weights).tolist(), strict=True)
    ]
    return weights.new_tensor(floors)


def _floor_of_row(weights: NDArray[np.float32], goal: float, whole: float) -> float:
    """Weights up to `least` are together lighter than what lies outside the nucleus, whatever their number."""
    least = 0.99 * (whole - goal) / len(weights)
    descending = np.sort(weights[weights > least])[::-1]
    if not len(descending):
        return 0.0
    reached = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), goal))
    return float(descending[min(reached, len(descending) - 1)])
