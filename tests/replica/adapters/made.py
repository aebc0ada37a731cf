"""Adapters made by hand, with plain safetensors, for a tiny base of two layers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from registry.types import AdapterManifest, ModuleKind, ModuleLora, TensorInfo
from replica.adapters.host_memory import HostBlock
from replica.adapters.weights import ImageLayout, plan_layout
from replica.model.batch import LoraPair, Site

HIDDEN, KV, INNER = 32, 16, 48
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ALL_SEVEN = tuple(SHAPES)
QV = ("self_attn.q_proj", "self_attn.v_proj")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def make_sites(num_layers: int = 2, scale: int = 1) -> tuple[Site, ...]:
    """The projections of a base whose dimensions are `scale` times those of SHAPES."""
    shapes = [(f"model.layers.{layer}.{name}", shape) for layer in range(num_layers) for name, shape in SHAPES.items()]
    return tuple(
        Site(index, path, width * scale, height * scale, ModuleKind.LINEAR)
        for index, (path, (width, height)) in enumerate(shapes)
    )


SITES = make_sites()
BY_PATH = {site.path: site for site in SITES}


@dataclass(frozen=True)
class Made:
    """An adapter: what the registry knows of it, the file's bytes, and the true tensors."""

    manifest: AdapterManifest
    blob: bytes
    tensors: Mapping[str, torch.Tensor]

    def __repr__(self) -> str:
        return f"Made({self.digest[:8]})"

    @property
    def digest(self) -> str:
        return self.manifest.digest


def layout_of(made: Made, dtype: torch.dtype) -> ImageLayout:
    """The layout of an adapter of SITES."""
    return plan_layout(made.manifest, BY_PATH, dtype)


def dirty_block(num_bytes: int) -> HostBlock:
    """Memory in which another image has lain: NaN in every dtype."""
    return HostBlock(torch.full((num_bytes,), 0xFF, dtype=torch.uint8))


def make_adapter(
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = ALL_SEVEN,
    dtype: str = "F32",
    sites: Sequence[Site] = SITES,
    fill: float | None = None,
) -> Made:
    """Random weights, all different by `seed`; `fill` makes every value of the last tensor that."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for site in sites:
        if site.path.split(".", 3)[3] in targets:
            for key, shape in _keys_and_shapes(site, rank):
                tensors[key] = torch.randn(shape, generator=random).to(DTYPES[dtype])
    if fill is not None:
        tensors[key].fill_(fill)
    return describe(tensors, sites, rank, seed)


def _keys_and_shapes(site: Site, rank: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    key = f"base_model.model.{site.path}"
    a, b = (rank, site.in_features), (site.out_features, rank)
    return (f"{key}.lora_A.weight", a), (f"{key}.lora_B.weight", b)


def describe(tensors: Mapping[str, torch.Tensor], sites: Sequence[Site], rank: int, seed: int) -> Made:
    """The manifest of a file that holds `tensors`."""
    blob = save(dict(tensors), metadata={"format": "pt"})
    modules = []
    for site in sites:
        (a, _), (b, _) = _keys_and_shapes(site, rank)
        if a in tensors:
            pair = [_info(key, tensors[key]) for key in (a, b)]
            modules.append(
                ModuleLora(path=site.path, rank=rank, alpha=16, scale=16 / rank + seed, a=pair[0], b=pair[1])
            )
    manifest = AdapterManifest(
        digest=hashlib.sha256(blob + str(seed).encode()).hexdigest(),
        base_digest="0" * 64,
        base_verified=True,
        modules=tuple(modules),
        blob_sha256=hashlib.sha256(blob).hexdigest(),
        blob_bytes=len(blob),
    )
    return Made(manifest, blob, tensors)


def _info(key: str, tensor: torch.Tensor) -> TensorInfo:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    fields = {"key": key, "shape": tuple(tensor.shape), "sha256": hashlib.sha256(raw).hexdigest()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    return TensorInfo.model_validate({**fields, "dtype": names[tensor.dtype]})


def assert_holds(
    pairs: Mapping[int, LoraPair], made: Made, dtype: torch.dtype = torch.float32, sites: Sequence[Site] = SITES
) -> None:
    """`pairs` are exactly the adapter's true tensors in `dtype`, bit for bit, and no others."""
    by_path = {module.path: module for module in made.manifest.modules}
    assert set(pairs) == {site.index for site in sites if site.path in by_path}
    for index, pair in pairs.items():
        module = by_path[sites[index].path]
        assert torch.equal(pair.a, made.tensors[module.a.key].to(dtype)), module.path
        assert torch.equal(pair.b, made.tensors[module.b.key].to(dtype)), module.path
        assert pair.scale == module.scale


class DictSource:
    """Serves blobs from memory, and counts the fetches."""

    def __init__(self, *adapters: Made) -> None:
        self.blobs = {made.manifest.blob_sha256: made.blob for made in adapters}
        self.num_fetches = 0

    def fetch(self, sha256: str, to: Path) -> None:
        self.num_fetches += 1
        if sha256 not in self.blobs:
            raise FileNotFoundError(sha256)
        to.write_bytes(self.blobs[sha256])
