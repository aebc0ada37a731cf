"""FlashInfer's paged wrappers in plain torch, as far as we use them; they read what the real ones read."""

from types import ModuleType
from typing import Any

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window_left: int, softcap: float
) -> torch.Tensor:
    """The last rows of one sequence: `q` [rows, heads, dim], `k` and `v` [tokens, kv_heads, dim]."""
    num_rows, num_tokens = q.shape[0], k.shape[0]
    k, v = (kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1) for kv in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(num_tokens - num_rows, num_tokens)[:, None] - torch.arange(num_tokens)[None]
    hidden = distance < 0
    if window_left >= 0:
        hidden |= distance > window_left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Wrapper:
    """What both wrappers share: a plan, and runs over pages."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.rule: dict[str, Any] = {}

    def keep(self, page_size: int, sm_scale: float, window_left: int, logits_soft_cap: float) -> None:
        self.num_plans += 1
        self.page_size = page_size
        self.rule = {"scale": sm_scale, "window_left": window_left, "softcap": logits_soft_cap}

    def over_pages(
        self, q: torch.Tensor, paged: Any, rows: Any, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        keys, values = paged
        outs = []
        for sequence in range(len(last)):
            pages = indices[indptr[sequence] : indptr[sequence + 1]].long()
            length = (len(pages) - 1) * self.page_size + int(last[sequence])
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (keys, values))
            outs.append(attend(q[rows[sequence] : rows[sequence + 1]], k, v, **self.rule))
        return torch.cat(outs)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        workspace: torch.Tensor,
        layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor,
        paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor,
    ) -> None:
        super().__init__()
        assert layout == "NHD"
        assert use_cuda_graph
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        global_override_indptr_cpu: torch.Tensor | None = None,
    ) -> None:
        """The host's arrays must be what the buffers hold already."""
        for array, buffer in zip((indptr, indices, last_page_len), self.buffers, strict=True):
            assert array.dtype == torch.int32
            assert torch.equal(array, buffer[: len(array)])
        assert len(last_page_len) == len(self.buffers[2])
        self.keep(page_size, sm_scale, window_left, logits_soft_cap)

    def run(self, q: torch.Tensor, paged: Any) -> torch.Tensor:
        rows = range(len(self.buffers[2]) + 1)
        return self.over_pages(q, paged, rows, *self.buffers)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str) -> None:
        super().__init__()
        assert layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        seq_lens: torch.Tensor,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        self.arrays = tuple(
            array.clone() for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        )
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(lengths, seq_lens)
        self.keep(page_size, sm_scale, window_left, logits_soft_cap)

    def run(self, q: torch.Tensor, paged: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        assert len(q) == self.arrays[0][-1], "the plan is for other rows"
        answers = self.over_pages(q, paged, *self.arrays)
        return answers if out is None else out.copy_(answers)


def fast_decode_plan(wrapper: BatchDecodeWithPagedKVCacheWrapper, *arguments: Any, **keywords: Any) -> None:
    assert wrapper.num_plans, "a wrapper's first plan is the whole one"
    wrapper.plan(*arguments, **keywords)


class Event:
    """A moment that is always past."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def modules() -> dict[str, ModuleType]:
    """What to put into `sys.modules`: FlashInfer, and the module of the kernel that needs Triton."""
    flashinfer, decode, kv_write = (ModuleType(name) for name in ("flashinfer", "flashinfer.decode", "kv_write"))
    flashinfer.__dict__.update(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        decode=decode,
    )
    decode.__dict__.update(fast_decode_plan=fast_decode_plan)
    kv_write.__dict__.update(write_kv=write_kv)
    return {
        "flashinfer": flashinfer,
        "flashinfer.decode": decode,
        "replica.kernels.kv_write": kv_write,
    }


def write_kv(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """The plain form of the kernel, which a machine without Triton cannot import."""
    real = slots >= 0
    keys[slots[real]], values[slots[real]] = k[real], v[real]
