"""From an uploaded safetensors file to an *image*: one contiguous tensor with every A and B of an adapter.

The image has the adapter's true ranks and only the modules it touches, each tensor at a 128-byte boundary, in the
base model's dtype. One copy brings it into a slot. Knows nothing of where images are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from registry.types import AdapterManifest, ModuleLora, TensorInfo
from replica.adapters.tensor_file import BadTensorFile, TensorFile, bytes_of, cast_into, dtype_of, is_finite
from replica.errors import AdapterUnavailable
from replica.model.batch import LoraPair, Site

ALIGNMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class PairPlace:
    """Where one module's A [rank, in] and B [out, rank] lie: offsets in elements from the start of the image."""

    site: int
    path: str
    rank: int
    in_features: int
    out_features: int
    a_offset: int
    b_offset: int
    scale: float


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The plan of an image. `num_elements` counts the padding between tensors and after the last one."""

    dtype: torch.dtype
    places: tuple[PairPlace, ...]
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AdapterImage:
    """An adapter in host memory: `data` is 1-D, of `layout.num_elements`, and is never written again."""

    digest: str
    layout: ImageLayout
    data: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes


def alignment_elements(dtype: torch.dtype) -> int:
    return ALIGNMENT_BYTES // dtype.itemsize


def plan_layout(manifest: AdapterManifest, sites: Mapping[str, Site], dtype: torch.dtype) -> ImageLayout:
    """Place every pair of an adapter, in the order of the sites. Pure.

    Raises AdapterUnavailable when a module is not one of `sites` or has another shape there.
    """
    modules = sorted(manifest.modules, key=lambda module: _site_of(module, sites, manifest.digest).index)
    offsets = _Offsets(alignment_elements(dtype))
    places = tuple(_place(module, sites[module.path], offsets) for module in modules)
    return ImageLayout(dtype, places, offsets.end)


class _Offsets:
    """Hands out aligned offsets one after the other."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self.end = 0

    def take(self, num_elements: int) -> int:
        start = self.end
        self.end += -(-num_elements // self._alignment) * self._alignment
        return start


def _place(module: ModuleLora, site: Site, offsets: _Offsets) -> PairPlace:
    return PairPlace(
        site=site.index,
        path=site.path,
        rank=module.rank,
        in_features=site.in_features,
        out_features=site.out_features,
        a_offset=offsets.take(module.rank * site.in_features),
        b_offset=offsets.take(site.out_features * module.rank),
        scale=module.scale,
    )


def _site_of(module: ModuleLora, sites: Mapping[str, Site], digest: str) -> Site:
    site = sites.get(module.path)
    if site is None:
        raise AdapterUnavailable(f"adapter {digest}: the base model has no projection {module.path}")
    expected = (module.rank, site.in_features), (site.out_features, module.rank)
    found = module.a.shape, module.b.shape
    if found != expected:
        raise AdapterUnavailable(f"adapter {digest}: {module.path} has shapes {found}, the base needs {expected}")
    return site


def read_image(path: Path, manifest: AdapterManifest, layout: ImageLayout, pin: bool) -> AdapterImage:
    """Read a memory-mapped safetensors file into a new image, in page-locked memory with `pin`.

    Raises AdapterUnavailable when the file is not what the manifest says, or a value is not finite in the image's
    dtype (a float32 beyond 65504 overflows in float16).
    """
    data = torch.zeros(layout.num_elements, dtype=layout.dtype, pin_memory=pin)
    stretches = _stretches(manifest, layout)
    try:
        file = TensorFile(path)
        for dtype in {dtype_of(stretch.info) for stretch in stretches}:
            _read_all_of(dtype, file, stretches, data)
        _check_finite(data, stretches)
    except (BadTensorFile, OSError) as error:
        raise AdapterUnavailable(f"adapter {manifest.digest}: its file cannot be used: {error}") from error
    return AdapterImage(manifest.digest, layout, data)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Where in an image a tensor of the file goes: elements [start, end)."""

    info: TensorInfo
    start: int
    end: int


def _stretches(manifest: AdapterManifest, layout: ImageLayout) -> list[_Stretch]:
    modules = {module.path: module for module in manifest.modules}
    found = []
    for place in layout.places:
        module = modules[place.path]
        found.append(_Stretch(module.a, place.a_offset, place.a_offset + place.rank * place.in_features))
        found.append(_Stretch(module.b, place.b_offset, place.b_offset + place.out_features * place.rank))
    return found


def _read_all_of(dtype: torch.dtype, file: TensorFile, stretches: list[_Stretch], data: torch.Tensor) -> None:
    """Bring the file's tensors of one dtype to their places; those of another dtype than the image's by a cast."""
    chosen = [stretch for stretch in stretches if dtype_of(stretch.info) is dtype]
    source = data if dtype is data.dtype else torch.zeros(data.numel(), dtype=dtype)
    raw = bytes_of(source)
    for stretch in chosen:
        raw[stretch.start * dtype.itemsize : stretch.end * dtype.itemsize] = file.raw(stretch.info)
    if source is data:
        return
    if len(chosen) == len(stretches):
        cast_into(data, source)
        return
    for stretch in chosen:
        cast_into(data[stretch.start : stretch.end], source[stretch.start : stretch.end])


def _check_finite(data: torch.Tensor, stretches: list[_Stretch]) -> None:
    if is_finite(data):
        return
    bad = next(stretch for stretch in stretches if not is_finite(data[stretch.start : stretch.end]))
    raise BadTensorFile(f"{bad.info.key} has values that are not finite in {data.dtype}")


def view_pairs(memory: torch.Tensor, start: int, layout: ImageLayout) -> Mapping[int, LoraPair]:
    """Views of an image that lies in the 1-D tensor `memory` from element `start`: site index -> pair."""
    return MappingProxyType({place.site: _view(memory, start, place) for place in layout.places})


def _view(memory: torch.Tensor, start: int, place: PairPlace) -> LoraPair:
    rank, width, height = place.rank, place.in_features, place.out_features
    return LoraPair(
        a=memory.as_strided((rank, width), (width, 1), start + place.a_offset),
        b=memory.as_strided((height, rank), (rank, 1), start + place.b_offset),
        scale=place.scale,
    )
