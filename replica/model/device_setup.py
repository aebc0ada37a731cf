"""Puts the parts of the path for GPUs together: groups, handles, compiled layers, attention, kernels."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from replica.config import ModelConfig
from replica.kernels.groups import SlotTables
from replica.model.architecture import AttentionProbe, framing_modules, layer_prefixes, probe_layers
from replica.model.batch import Site
from replica.model.compiled_layers import compile_layers
from replica.model.device_runner import DeviceRunner
from replica.model.paged_attention import HANDLED_IMPLEMENTATION, KVCache
from replica.model.projections import Call, group_sites, install_groups
from replica.model.step_attention import LayerHeads, StepAttention, TorchAttention
from replica.model.step_ops import make_handle
from replica.model.step_state import LayerOfModel, LoraKernels, StepState

logger = logging.getLogger(__name__)


def build_device_runner(
    model: Any, sites: Sequence[Site], probe: AttentionProbe, config: ModelConfig, context_length: int
) -> DeviceRunner:
    """Rebuild `model` for the device: merge its projections, give its layers handles, put them behind the compiler."""
    state = StepState()
    install_groups(model, group_sites(model, sites, observe_calls(model, sites)), state)
    for layer, module in probe.modules.items():
        record = LayerOfModel(state, layer, probe.rules[layer])
        module.paged_record, module.paged_handle = record, make_handle(record)  # type: ignore[assignment]
    model.set_attn_implementation(HANDLED_IMPLEMENTATION)
    layers = [model.get_submodule(prefix.rstrip(".")) for prefix in layer_prefixes(model, probe)]
    is_compiled = config.compile == "on" or (config.compile == "auto" and model.device.type == "cuda")
    if is_compiled:
        layers += framing_modules(model, probe)
        compile_layers(layers)
    return DeviceRunner(
        model=model,
        state=state,
        layers=layers,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        context_length=context_length,
        with_graphs=config.cuda_graphs == "auto" and model.device.type == "cuda",
        is_compiled=is_compiled,
    )


def observe_calls(model: Any, sites: Sequence[Site]) -> list[Call]:
    """In which order one forward calls the sites' modules, and on which tensors."""
    calls: list[Call] = []
    hooks = [
        model.get_submodule(site.path).register_forward_pre_hook(
            lambda _, arguments, path=site.path: calls.append(Call(path, arguments[0]))
        )
        for site in sites
    ]
    try:
        probe_layers(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def attention_over(cache: KVCache, layers: Sequence[LayerHeads], config: ModelConfig) -> StepAttention:
    """FlashInfer where it can serve these layers; gathers and SDPA elsewhere, which says so once on a GPU."""
    if cache.keys[0].device.type != "cuda" or config.attention == "torch":
        return TorchAttention(cache)
    from replica.model.flashinfer_attention import FlashInferAttention, FlashInferSettings, why_not

    reason = why_not(layers, cache.keys[0].dtype)
    if reason is not None:
        logger.warning("attention runs in plain torch, without CUDA graphs: FlashInfer cannot be used, %s", reason)
        return TorchAttention(cache)
    settings = FlashInferSettings(config.decode_tensor_cores, config.prefill_backend)
    return FlashInferAttention(cache, layers, settings)


def kernels_over(memory: torch.Tensor, tables: SlotTables) -> LoraKernels:
    """The grouped kernels over an arena."""
    from replica.kernels import grouped_lora

    return grouped_lora.LoraKernels(memory, tables)
