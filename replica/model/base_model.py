"""The base model, loaded once: packed token rows in, logits out, LoRA pairs applied on the way. Knows no requests."""

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from registry.types import BaseSpec
from replica.config import ModelConfig
from replica.errors import ModelError
from replica.model.architecture import AttentionProbe, check_layers, find_sites, pin_rope, refuse_config
from replica.model.attention_plan import AttentionPlan
from replica.model.base_files import resolve_base, resolve_device, resolve_dtype
from replica.model.base_spec import build_spec, module_specs, read_tokenizer
from replica.model.batch import ForwardBatch, Site
from replica.model.lora_linear import LoraLinear, LoraStep
from replica.model.paged_attention import IMPLEMENTATION, KVCache, LayerShape, PagedStep, paged_attention

AttentionInterface.register(IMPLEMENTATION, paged_attention)


class BaseModel:
    """One resident base. `forward` may be called from one thread at a time."""

    def __init__(
        self,
        model: Any,
        *,
        sites: tuple[Site, ...],
        layers: tuple[LayerShape, ...],
        spec: BaseSpec,
        tokenizer_json: bytes,
    ) -> None:
        self._model = model
        self._layers = layers
        self._cache: KVCache | None = None
        self._running = threading.Lock()
        self._lora = LoraStep()
        self.sites = sites
        self.spec = spec
        self.tokenizer_json = tokenizer_json
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = spec.vocab_size
        self.context_length = spec.context_length
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        for site in sites:
            model.set_submodule(site.path, LoraLinear(model.get_submodule(site.path), site, self._lora))

    @classmethod
    def load(cls, config: ModelConfig) -> "BaseModel":
        """Find, load and check the base. Raises ModelError for a base that is missing or cannot be served right."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        folder = resolve_base(config)
        model = _load_model(folder, config)
        text_config = model.config.get_text_config(decoder=True)
        probe = _probe(model)
        layers = check_layers(probe, text_config)
        context_length = _context_length(config, text_config)
        sites = find_sites(model, probe)
        pin_rope(model, text_config, context_length)
        tokenizer = read_tokenizer(folder)
        weights = {site.path: model.get_submodule(site.path).weight for site in sites}
        spec = build_spec(
            config.base_name,
            model,
            module_specs(sites, weights),
            tokenizer,
            context_length=context_length,
            vocab_size=model.get_output_embeddings().weight.shape[0],
        )
        return cls(model, sites=sites, layers=layers, spec=spec, tokenizer_json=tokenizer.json)

    def __repr__(self) -> str:
        return (
            f"BaseModel({self.spec.base_id}, {self.spec.architecture}, {self.dtype}, {self.device}, "
            f"num_sites={len(self.sites)}, kv={self._cache})"
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block of `block_size` tokens takes over all layers."""
        return block_size * self.dtype.itemsize * sum(layer.elements_per_token for layer in self._layers)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the paged cache, in place of any there was. Raises OutOfMemory when the device cannot hold it."""
        self._cache = None
        self._cache = KVCache(self._layers, num_blocks, block_size, self.device, self.dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one packed step and write its keys and values into the cache.

        Returns float32 logits [num_logits, vocab_size], an inference tensor: change it in place under
        `torch.inference_mode()` only.
        """
        cache = self._cache
        assert cache is not None, "allocate_kv comes before forward"
        plan = AttentionPlan(batch.spans, cache.block_size, self.device, self.dtype)
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


def _load_model(folder: Path, config: ModelConfig) -> Any:
    offline = {"local_files_only": True, "trust_remote_code": False}
    try:
        hf_config = AutoConfig.from_pretrained(folder, **offline)
    except Exception as error:  # any library may be behind a config, and raise anything
        raise ModelError(f"{folder} has a config.json that cannot be read: {error}") from error
    refuse_config(hf_config)
    dtype = getattr(torch, resolve_dtype(config))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=hf_config, dtype=dtype, use_safetensors=True, **offline
        )
    except Exception as error:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    model.set_attn_implementation(IMPLEMENTATION)
    return model.to(resolve_device(config)).eval()


def _context_length(config: ModelConfig, text_config: Any) -> int:
    trained = int(text_config.max_position_embeddings)
    if config.context_length is None:
        return trained
    if config.context_length > trained:
        raise ModelError(f"model.context_length is {config.context_length}; allowed for this base: 16 to {trained}")
    return config.context_length


def _probe(model: Any) -> AttentionProbe:
    """Run one token through the model and see what each layer asks of attention."""
    probe = AttentionProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, paged_meta=probe)
    except TypeError as error:
        raise ModelError(f"{type(model).__name__} does not attend through AttentionInterface: {error}") from error
    return probe
