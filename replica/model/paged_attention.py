"""Attention over a paged KV cache for one packed row of tokens, behind transformers' AttentionInterface.

Plain torch: gathers by index and scaled dot products. Knows nothing of sequences' identities, and of weights nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from replica.errors import OutOfMemory
from replica.model.attention_plan import AttentionPlan, DecodeGroup, PrefillPart
from replica.model.step_ops import attend

HANDLED_IMPLEMENTATION = "lorafleet_handled"
"""The name of `handled_attention`, the same for compiled layers."""

IMPLEMENTATION = "lorafleet_paged"
"""The name under which `paged_attention` is registered. It has no mask function, so transformers builds no masks."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token: `num_kv_heads` keys of `key_dim` and values of `value_dim`."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How scores are made: times `scaling`, capped softly at `softcap`, seen through `window` last tokens."""

    scaling: float
    window: int | None
    softcap: float | None


class AttentionStep(Protocol):
    """What travels to every layer of one forward as the keyword argument `paged_meta`."""

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        """`q` [rows, heads, dim], `k` and `v` [rows, kv_heads, dim]; returns [rows, heads, value_dim]."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    paged_meta: AttentionStep,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer, with tensors [1, heads, rows, dim]."""
    rule = ScoreRule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged_meta.attend(module, q, k, v, rule)[None], None


def handled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_known_to_the_record: Any,
) -> tuple[torch.Tensor, None]:
    """The same as an operation that a compiler passes over: what the layer is stands behind `module.paged_handle`."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(q, k, v, module.paged_handle)[None], None  # type: ignore[arg-type]


class KVCache:
    """Keys and values of every layer, each [num_blocks * block_size, kv_heads, dim]."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        num_slots = num_blocks * block_size
        try:
            self.keys = [_zeros(num_slots, shape.num_kv_heads, shape.key_dim, device, dtype) for shape in shapes]
            self.values = [_zeros(num_slots, shape.num_kv_heads, shape.value_dim, device, dtype) for shape in shapes]
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(
                f"num_kv_blocks is {num_blocks} of {block_size} tokens; {device} cannot hold it"
            ) from error

    def __repr__(self) -> str:
        return f"KVCache(num_layers={len(self.keys)}, num_blocks={self.num_blocks}, block_size={self.block_size})"


def _zeros(slots: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(slots, heads, dim, device=device, dtype=dtype)


class PagedStep:
    """One step over a cache: writes the new rows' keys and values, then attends."""

    def __init__(self, cache: KVCache, plan: AttentionPlan) -> None:
        self._cache = cache
        self._plan = plan

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        return self.attend_layer(int(module.layer_idx), q, k, v, rule)  # type: ignore[arg-type]

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        """`q` [rows, heads, dim], `k` and `v` [rows, kv_heads, dim]; returns [rows, heads, value_dim]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._plan.slot_mapping, k)
        values.index_copy_(0, self._plan.slot_mapping, v)
        view = self._plan.view(rule.window)
        if view.is_one_group:
            return _decode(q, keys, values, view.decodes[0], rule)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for group in view.decodes:
            out[group.rows] = _decode(q[group.rows], keys, values, group, rule)
        for part in view.prefills:
            rows = slice(part.start, part.end)
            sources = (k[rows], v[rows]) if part.slots is None else (keys[part.slots], values[part.slots])
            out[rows] = _prefill(q[rows], *sources, part, rule)
        return out


def _decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, rule: ScoreRule
) -> torch.Tensor:
    """One query a sequence, all sequences of the group at once; the heads that share a key head are SDPA's rows."""
    num_kv_heads, shape = keys.shape[1], (group.num_rows, group.length)
    k = keys.index_select(0, group.slots).view(*shape, num_kv_heads, -1).transpose(1, 2)
    v = values.index_select(0, group.slots).view(*shape, num_kv_heads, -1).transpose(1, 2)
    grouped = q.reshape(group.num_rows, num_kv_heads, -1, q.shape[-1])
    return _scores_times_values(grouped, k, v, group.mask, rule).reshape(group.num_rows, q.shape[1], -1)


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PrefillPart, rule: ScoreRule) -> torch.Tensor:
    """A chunk of one sequence: key heads are SDPA's batch, and their query heads read them through a view."""
    num_rows, num_heads, num_kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.transpose(0, 1).reshape(num_kv_heads, group, num_rows, -1)
    k, v = (kv.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for kv in (k, v))
    out = _scores_times_values(grouped, k, v, part.mask, rule, is_causal=part.mask is None)
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)


def _scores_times_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rule: ScoreRule,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    if rule.softcap is not None:
        return _softcapped(q, k, v, mask, rule.scaling, rule.softcap, is_causal)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scaling, is_causal=is_causal)


def _softcapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
    is_causal: bool,
) -> torch.Tensor:
    """Scores through `softcap * tanh(score / softcap)` (Gemma 2), which SDPA does not know."""
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scaling / softcap))
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
