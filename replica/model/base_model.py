"""The base model, loaded once: packed token rows in, logits out, LoRA pairs applied on the way. Knows no requests."""

from pathlib import Path
from typing import Any

import torch

from registry.types import BaseSpec
from replica.config import ModelConfig
from replica.errors import ModelError
from replica.kernels.groups import SlotTables
from replica.model.architecture import check_layers, find_sites, pin_rope, probe_layers
from replica.model.base_files import base_revision, resolve_base
from replica.model.base_spec import build_spec, module_specs, named_specs, read_tokenizer
from replica.model.batch import ForwardBatch, Site
from replica.model.cuda_graphs import CaptureReport
from replica.model.device_runner import Adapters, DeviceRunner, HostTimes, StepLimits
from replica.model.device_setup import attention_over, build_device_runner, kernels_over
from replica.model.eager_runner import EagerRunner
from replica.model.load_weights import load_model
from replica.model.paged_attention import KVCache
from replica.model.step_attention import LayerHeads


class BaseModel:
    """One resident base. `forward` may be called from one thread at a time.

    The order is: `load`, `allocate_kv`, `attach_adapters`, `prepare`, then `forward`.
    """

    def __init__(
        self,
        model: Any,
        runner: EagerRunner | DeviceRunner,
        *,
        sites: tuple[Site, ...],
        layers: tuple[LayerHeads, ...],
        spec: BaseSpec,
        tokenizer_json: bytes,
        config: ModelConfig,
    ) -> None:
        self._model, self._runner = model, runner
        self._layers = layers
        self._config = config
        self._cache: KVCache | None = None
        self.sites = sites
        self.spec = spec
        self.tokenizer_json = tokenizer_json
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = spec.vocab_size
        self.context_length = spec.context_length
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        self.capture_report = CaptureReport()

    @classmethod
    def load(cls, config: ModelConfig, *, on_device: bool | None = None) -> "BaseModel":
        """Find, load and check the base. Raises ModelError for a base that is missing or cannot be served right.

        `on_device` chooses the path for GPUs (merged projections, compiled layers, graphs); as a rule the device does.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        folder = resolve_base(config)
        model = load_model(folder, config)
        text_config = model.config.get_text_config(decoder=True)
        probe = probe_layers(model)
        shapes = check_layers(probe, text_config)
        layers = tuple(LayerHeads(shape, probe.num_heads[i], probe.rules[i]) for i, shape in enumerate(shapes))
        context_length = _context_length(config, text_config)
        sites = find_sites(model, probe)
        pin_rope(model, text_config, context_length)
        spec, tokenizer_json = _describe(config, folder, model, sites, context_length)
        on_device = model.device.type == "cuda" if on_device is None else on_device
        runner = (
            build_device_runner(model, sites, probe, config, context_length) if on_device else EagerRunner(model, sites)
        )
        return cls(
            model,
            runner,
            sites=sites,
            layers=layers,
            spec=spec,
            tokenizer_json=tokenizer_json,
            config=config,
        )

    def __repr__(self) -> str:
        return (
            f"BaseModel({self.spec.base_id}, {self.spec.architecture}, {self.dtype}, {self.device}, "
            f"num_sites={len(self.sites)}, kv={self._cache}, {self._runner})"
        )

    @property
    def host_times(self) -> HostTimes:
        """What the host spent on steps; stays empty on the plain path."""
        return self._runner.times if isinstance(self._runner, DeviceRunner) else HostTimes()

    def replay(self, num_rows: int, max_rank: int) -> None:
        """The last decode step once more, for measurements on a device; `max_rank` is that of its adapters, or 0."""
        assert isinstance(self._runner, DeviceRunner), "only a device's steps are recorded"
        self._runner.replay(num_rows, max_rank)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block of `block_size` tokens takes over all layers."""
        return block_size * self.dtype.itemsize * sum(layer.shape.elements_per_token for layer in self._layers)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the paged cache, in place of any there was. Raises OutOfMemory when the device cannot hold it.

        On a device there is one block more than asked for: padding rows of recorded steps lie in it.
        """
        self._cache = None
        self._runner.release()
        num_spare = int(isinstance(self._runner, DeviceRunner))
        shapes = [layer.shape for layer in self._layers]
        self._cache = cache = KVCache(shapes, num_blocks + num_spare, block_size, self.device, self.dtype)
        if isinstance(self._runner, DeviceRunner):
            self._runner.use_cache(cache, attention_over(cache, self._layers, self._config))
        else:
            self._runner.use_cache(cache)

    def attach_adapters(self, memory: torch.Tensor, tables: SlotTables, max_rank: int) -> None:
        """Let steps use the slots of an arena: `memory` is 1-D, in the base's dtype. On the CPU segments bring all."""
        if isinstance(self._runner, DeviceRunner):
            self._runner.use_adapters(Adapters(kernels_over(memory, tables), max_rank))

    def prepare(self, limits: StepLimits) -> CaptureReport:
        """Get ready for steps up to `limits`: compile and capture on a device. Raises OutOfMemory."""
        if isinstance(self._runner, DeviceRunner):
            self.capture_report = self._runner.prepare(limits)
        return self.capture_report

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one packed step and write its keys and values into the cache.

        Returns float32 logits [num_logits, vocab_size], an inference tensor: change it in place under
        `torch.inference_mode()` only. On a device the next step may overwrite it: what is read from it must be queued
        before.
        """
        return self._runner.forward(batch)


def _describe(
    config: ModelConfig, folder: Path, model: Any, sites: tuple[Site, ...], context_length: int
) -> tuple[BaseSpec, bytes]:
    tokenizer = read_tokenizer(folder)
    if config.weights == "random":
        modules = named_specs(sites, {"config": model.config.to_dict(), "seed": config.seed})
    else:
        modules = module_specs(sites, {site.path: model.get_submodule(site.path).weight for site in sites})
    spec = build_spec(
        config.base_name,
        base_revision(config, folder),
        model,
        modules,
        tokenizer,
        context_length=context_length,
        vocab_size=model.get_output_embeddings().weight.shape[0],
    )
    return spec, tokenizer.json


def _context_length(config: ModelConfig, text_config: Any) -> int:
    trained = int(text_config.max_position_embeddings)
    if config.context_length is None:
        return trained
    if config.context_length > trained:
        raise ModelError(f"model.context_length is {config.context_length}; allowed for this base: 16 to {trained}")
    return config.context_length
