"""Paged attention by FlashInfer 0.6 (extra `gpu`): its wrappers, planned once a step for each kind of layer.

FlashInfer compiles its kernels when they are first planned, below FLASHINFER_WORKSPACE_BASE (the home folder); that
takes most of a minute where they are not there yet, and happens beside whatever else a start has to do.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from replica.model.batch import SequenceSpan
from replica.model.page_table import PageTable, build_page_table
from replica.model.paged_attention import KVCache, ScoreRule
from replica.model.step_attention import LayerHeads
from replica.model.step_buffers import StepBuffers

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlashInferSettings:
    """`use_tensor_cores` for decode (None: where several query heads share a key head); `prefill` names a backend."""

    use_tensor_cores: bool | None = None
    prefill: str = "fa2"


def why_not(layers: Sequence[LayerHeads], dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve these layers; None when it can."""
    if dtype.itemsize != 2:
        return f"it needs a 16-bit dtype, the base has {dtype}"
    for heads in layers:
        shape = heads.shape
        if shape.key_dim != shape.value_dim or shape.key_dim not in HEAD_DIMS:
            return f"heads of {shape.key_dim} and {shape.value_dim}; it has {', '.join(map(str, HEAD_DIMS))}"
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # a broken CUDA toolchain may raise anything here
        return f"it cannot be imported ({type(error).__name__}: {error}); it comes with the extra `gpu`"
    return None


class FlashInferAttention:
    """The step's attention over `cache`. Layers that attend alike share one plan."""

    can_be_captured = True

    def __init__(
        self, cache: KVCache, layers: Sequence[LayerHeads], settings: FlashInferSettings | None = None
    ) -> None:
        self._cache, self.layers = cache, tuple(layers)
        self._settings = settings or FlashInferSettings()
        self._kinds = tuple(dict.fromkeys(layers))
        self._device, self._dtype = cache.keys[0].device, cache.keys[0].dtype
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._decoders: dict[tuple[int, LayerHeads], Any] = {}
        self._prefillers: dict[LayerHeads, Any] = {}
        self._running: dict[LayerHeads, Any] = {}
        self._slots: torch.Tensor | None = None
        self._planned: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pages = [
            (_paged(keys, cache.block_size), _paged(values, cache.block_size))
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        self._building: Future[None] | None = _in_background(self._build)

    def __repr__(self) -> str:
        return f"FlashInferAttention(kinds={len(self._kinds)}, decoders={len(self._decoders)}, {self._settings})"

    def begin_decode(self, table: PageTable, buffers: StepBuffers) -> None:
        """Plan on this batch size's own wrappers, which read the page table in `buffers`."""
        self._begin(table, buffers)
        arrays = [torch.from_numpy(array) for array in (table.page_starts, table.pages, table.last_page_lens)]
        self._running = {kind: self._plan_decoder(kind, table, arrays, buffers) for kind in self._kinds}
        self._planned.record()

    def begin(self, table: PageTable, buffers: StepBuffers) -> None:
        """Plan a step of any mixture; FlashInfer copies the page table itself."""
        self._begin(table, buffers)
        self._running = {kind: self._plan_prefiller(kind, table) for kind in self._kinds}
        self._planned.record()

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        assert self._slots is not None, "begin comes before attend_layer"
        self.write_layer(layer, k, v, self._slots)
        out: torch.Tensor = self._running[self.layers[layer]].run(q.contiguous(), self._pages[layer])
        return out

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        from replica.kernels.kv_write import write_kv

        write_kv(self._cache.keys[layer], self._cache.values[layer], k, v, slots)

    def read_layer(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._running[self.layers[layer]].run(q, self._pages[layer], out=out)

    def _build(self) -> None:
        """Have FlashInfer make what it needs, by planning a step of two tokens."""
        table = build_page_table((SequenceSpan(2, 2, (0, 1)),), self._cache.block_size)
        with torch.inference_mode():
            self._running = {kind: self._plan_prefiller(kind, table) for kind in self._kinds}

    def _begin(self, table: PageTable, buffers: StepBuffers) -> None:
        """Wait until the last plans have left the wrappers' pinned memory, which the next ones overwrite."""
        if self._building is not None:
            self._building.result()
            self._building = None
        self._planned.synchronize()
        self._slots = buffers.views["slots"][: table.num_rows]

    def _plan_decoder(
        self, kind: LayerHeads, table: PageTable, arrays: Sequence[torch.Tensor], buffers: StepBuffers
    ) -> Any:
        """Once with all that FlashInfer prepares; from then on only the schedule, since `buffers` holds the rest."""
        from flashinfer.decode import fast_decode_plan

        key = (table.num_sequences, kind)
        is_new = key not in self._decoders
        if is_new:
            self._decoders[key] = self._make_decoder(kind, table.num_sequences, buffers)
        wrapper = self._decoders[key]
        shape = kind.shape
        heads = (kind.num_heads, shape.num_kv_heads, shape.key_dim, self._cache.block_size)
        if is_new:
            wrapper.plan(*arrays, *heads, **self._rule(kind))
        else:
            fast_decode_plan(wrapper, *arrays, *heads, global_override_indptr_cpu=arrays[0], **self._rule(kind))
        return wrapper

    def _make_decoder(self, kind: LayerHeads, batch_size: int, buffers: StepBuffers) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        shared = kind.num_heads // kind.shape.num_kv_heads
        wanted = self._settings.use_tensor_cores
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=shared > 2 if wanted is None else wanted,
            paged_kv_indptr_buffer=buffers.views["page_starts"][: batch_size + 1],
            paged_kv_indices_buffer=buffers.views["pages"],
            paged_kv_last_page_len_buffer=buffers.views["last_page_lens"][:batch_size],
        )

    def _plan_prefiller(self, kind: LayerHeads, table: PageTable) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if kind not in self._prefillers:
            self._prefillers[kind] = BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend=self._settings.prefill
            )
        wrapper, shape = self._prefillers[kind], kind.shape
        wrapper.plan(
            torch.from_numpy(table.row_starts),
            torch.from_numpy(table.page_starts),
            torch.from_numpy(table.pages),
            torch.from_numpy(table.last_page_lens),
            kind.num_heads,
            shape.num_kv_heads,
            shape.key_dim,
            self._cache.block_size,
            causal=True,
            seq_lens=torch.from_numpy(table.contexts),
            **self._rule(kind),
        )
        return wrapper

    def _rule(self, kind: LayerHeads) -> dict[str, Any]:
        """FlashInfer counts a window without the current token."""
        rule = kind.rule
        return {
            "sm_scale": rule.scaling,
            "window_left": -1 if rule.window is None else rule.window - 1,
            "logits_soft_cap": rule.softcap or 0.0,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }


def _in_background(action: Callable[[], None]) -> "Future[None]":
    """Start `action` on a thread of its own; what it raises comes with the result."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="flashinfer-build")
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


def _paged(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    return cache.view(-1, block_size, *cache.shape[1:])
