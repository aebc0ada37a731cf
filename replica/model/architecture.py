"""What the base is made of, found by looking: attention layers, LoRA sites, RoPE. Refuses what cannot be served right.

A probe rides through one forward and sees how each layer calls attention, so nothing here depends on the names that
one architecture or another gives to its parts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from registry.types import ModuleKind
from replica.errors import ModelError
from replica.model.batch import Site
from replica.model.paged_attention import LayerShape, ScoreRule


@dataclass(slots=True)
class AttentionProbe:
    """Records each layer's shapes instead of attending; its answers are zeros."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    rules: dict[int, ScoreRule] = field(default_factory=dict)
    num_heads: dict[int, int] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.shapes:
            raise ModelError(f"{type(module).__name__} has no layer number of its own, so its KV cannot be kept")
        if not getattr(module, "is_causal", True):
            raise ModelError(f"{type(module).__name__} is not causal; only decoder-only models can be served")
        if getattr(module, "sinks", None) is not None:
            raise ModelError(f"{type(module).__name__} has attention sinks, which are not supported")
        self.shapes[layer] = LayerShape(k.shape[1], k.shape[2], v.shape[2])
        self.modules[layer], self.rules[layer], self.num_heads[layer] = module, rule, q.shape[1]
        return q.new_zeros(*q.shape[:2], v.shape[2])


def refuse_config(config: Any) -> None:
    """Raise ModelError for kinds of models whose cache or weights this replica would treat wrongly."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder; only decoder-only models can be served")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("the base is quantised; quantised bases are not supported, use its 16-bit weights")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelError(f"{config.model_type} shares KV between layers, which is not supported")
    for rope_type in _rope_types(text):
        if "dynamic" in rope_type:
            raise ModelError(
                f"rope_type is {rope_type!r}: its frequencies follow the longest sequence of a batch, so requests "
                "would change each other; set rope_parameters to linear or yarn, or choose another base"
            )


def _rope_types(text_config: Any) -> Iterator[str]:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for value in (parameters, *parameters.values()):
        if isinstance(value, Mapping) and isinstance(value.get("rope_type"), str):
            yield value["rope_type"]


def probe_layers(model: Any) -> AttentionProbe:
    """Run one token through the model and see what each layer asks of attention."""
    probe = AttentionProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, paged_meta=probe)
    except TypeError as error:
        raise ModelError(f"{type(model).__name__} does not attend through AttentionInterface: {error}") from error
    return probe


def check_layers(probe: AttentionProbe, text_config: Any) -> tuple[LayerShape, ...]:
    """The layers' shapes in order, once every layer is known to attend through the paged cache."""
    num_layers = text_config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        raise ModelError(
            f"{text_config.model_type}: {len(probe.shapes)} of {num_layers} layers attend through transformers' "
            "AttentionInterface; recurrent and hybrid models are not supported"
        )
    for layer, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        windowed = layer_type == "sliding_attention"
        if layer_type != "full_attention" and not windowed:
            raise ModelError(f"layer {layer} is of type {layer_type!r}; allowed: full_attention, sliding_attention")
        if windowed and probe.rules[layer].window is None:
            raise ModelError(f"{text_config.model_type}: layer {layer} does not say how long its window is")
    return tuple(probe.shapes[layer] for layer in range(num_layers))


def find_sites(model: nn.Module, probe: AttentionProbe) -> tuple[Site, ...]:
    """Every Linear and Conv1D inside the decoder layers, under PEFT's path.

    Experts are left out: they see some rows only, in an order of their own. Embeddings and the head are not in layers.
    """
    prefixes = layer_prefixes(model, probe)
    sites: list[Site] = []
    for path, module in model.named_modules():
        if not path.startswith(prefixes) or "experts" in path.split("."):
            continue
        if isinstance(module, Conv1D):
            sites.append(Site(len(sites), path, module.nx, module.nf, ModuleKind.CONV1D))
        elif isinstance(module, nn.Linear):
            sites.append(Site(len(sites), path, module.in_features, module.out_features, ModuleKind.LINEAR))
    if not sites:
        raise ModelError(f"{type(model).__name__} has no Linear or Conv1D projection in its layers")
    return tuple(sites)


def layer_prefixes(model: nn.Module, probe: AttentionProbe) -> tuple[str, ...]:
    """Of each layer the path with a dot: `model.layers.0.` where attention is `model.layers.0.self_attn`."""
    attentions = set(probe.modules.values())
    prefixes = set()
    for path, module in model.named_modules():
        if module in attentions:
            parts = path.split(".")
            number = next(place for place, part in enumerate(parts) if part.isdigit())
            prefixes.add(".".join(parts[: number + 1]) + ".")
    return tuple(sorted(prefixes))


def framing_modules(model: nn.Module, probe: AttentionProbe) -> list[nn.Module]:
    """What stands beside the layers and computes small things for all of them: rotary angles, the last norm."""
    container = model.get_submodule(layer_prefixes(model, probe)[0].rstrip(".").rpartition(".")[0].rpartition(".")[0])
    beside = [module for module in container.children() if not isinstance(module, nn.Embedding | nn.ModuleList)]
    return [module for module in beside if next(_tensors(module), None) is not None]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def pin_rope(model: nn.Module, text_config: Any, context_length: int) -> None:
    """Fix `longrope` frequencies for the served context length, whatever sequences a batch holds.

    Contexts up to the length of pre-training use the short factors, longer ones the long factors for every request
    (arXiv:2402.13753 switches by the length of the sequence).
    """
    for rotary in model.modules():
        rope_type = getattr(rotary, "rope_type", None)
        if rope_type == "longrope":
            _pin(rotary, text_config, context_length)
            rotary.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(rope_type, Mapping) and "longrope" in rope_type.values():
            raise ModelError("longrope frequencies that differ between layer types are not supported")


def _pin(rotary: nn.Module, text_config: Any, context_length: int) -> None:
    trained = int(text_config.rope_parameters["original_max_position_embeddings"])
    length = trained + 1 if context_length > trained else trained
    device = rotary.inv_freq.device
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](text_config, device, seq_len=length)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
