"""The packed forward in plain torch, layer by layer: the path on the CPU. Knows no requests."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from replica.model.attention_plan import AttentionPlan
from replica.model.batch import ForwardBatch, Site
from replica.model.lora_linear import LoraLinear, LoraStep
from replica.model.paged_attention import KVCache, PagedStep


class EagerRunner:
    """Runs the steps of `model`, whose projections it replaces by ones that add the step's pairs."""

    def __init__(self, model: Any, sites: Sequence[Site]) -> None:
        self._model = model
        self._cache: KVCache | None = None
        self._running = threading.Lock()
        self._lora = LoraStep()
        for site in sites:
            model.set_submodule(site.path, LoraLinear(model.get_submodule(site.path), site, self._lora))

    def __repr__(self) -> str:
        return f"EagerRunner({self._model.device})"

    def release(self) -> None:
        """Let go of the cache, so that another can take its memory."""
        self._cache = None

    def use_cache(self, cache: KVCache) -> None:
        self._cache = cache

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Float32 logits [num_logits, vocab_size]."""
        cache = self._cache
        assert cache is not None, "allocate_kv comes before forward"
        plan = AttentionPlan(batch.spans, cache.block_size, self._model.device, self._model.dtype)
        assert plan.num_rows == batch.token_ids.shape[0] == batch.positions.shape[0], "spans and rows disagree"
        with self._running, torch.inference_mode(), self._lora.running(batch.segments):
            out = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                paged_meta=PagedStep(cache, plan),
            )
        logits: torch.Tensor = out.logits[0].float()
        return logits
