"""The *image* of an adapter: one contiguous tensor with every A and B of it, and the plan of where they lie.

An image has the adapter's true ranks and only the modules it touches, each tensor at a 128-byte boundary, in the
base model's dtype; rows of B begin at multiples of `ROW_STEP` elements, as the kernels read them. One copy brings it
into a slot. Knows nothing of where images are kept.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from registry.types import AdapterManifest, ModuleLora
from replica.adapters.host_memory import ALIGNMENT_BYTES, HostBlock
from replica.errors import AdapterUnavailable
from replica.kernels.rows import ROW_STEP
from replica.model.batch import LoraPair, Site


def row_of_b(rank: int) -> int:
    """Elements from one row of a B of that rank to the next."""
    return -(-rank // ROW_STEP) * ROW_STEP


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


@dataclass(frozen=True)
class ImageLayout:
    """The plan of an image. `num_elements` counts the padding between tensors and after the last one."""

    dtype: torch.dtype
    places: tuple[PairPlace, ...]
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @cached_property
    def columns(self) -> "Columns":
        """The places as columns."""
        return Columns.of(self.places)


@dataclass(frozen=True, slots=True)
class Columns:
    """One entry a pair, for tables: site (int64), offset of A and of B (int64), rank (int32), scale (float32)."""

    sites: npt.NDArray[np.int64]
    a_offsets: npt.NDArray[np.int64]
    b_offsets: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float32]

    @classmethod
    def of(cls, places: tuple[PairPlace, ...]) -> "Columns":
        return cls(
            np.array([place.site for place in places], dtype=np.int64),
            np.array([place.a_offset for place in places], dtype=np.int64),
            np.array([place.b_offset for place in places], dtype=np.int64),
            np.array([place.rank for place in places], dtype=np.int32),
            np.array([place.scale for place in places], dtype=np.float32),
        )


@dataclass(frozen=True, slots=True)
class AdapterImage:
    """An adapter in host memory: `data` is 1-D, of `layout.num_elements`, and is never written again.

    `block` is the memory it lies in, kept as long as the image is. `convert_share` is the part of the time of its
    reading that went into casting and checking values.
    """

    digest: str
    layout: ImageLayout
    data: torch.Tensor
    block: HostBlock
    convert_share: float = 0.0

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


def largest_layout(sites: Iterable[Site], dtype: torch.dtype, max_elements: int, max_rank: int) -> ImageLayout:
    """The layout of an adapter of all sites with the largest rank that fits; empty when none does. Pure."""
    for rank in range(max_rank, 0, -1):
        offsets = _Offsets(alignment_elements(dtype))
        places = tuple(_place_at(site, rank, 1.0, offsets) for site in sites)
        if offsets.end <= max_elements:
            return ImageLayout(dtype, places, offsets.end)
    return ImageLayout(dtype, (), 0)


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
    return _place_at(site, module.rank, module.scale, offsets)


def _place_at(site: Site, rank: int, scale: float, offsets: _Offsets) -> PairPlace:
    return PairPlace(
        site=site.index,
        path=site.path,
        rank=rank,
        in_features=site.in_features,
        out_features=site.out_features,
        a_offset=offsets.take(rank * site.in_features),
        b_offset=offsets.take(site.out_features * row_of_b(rank)),
        scale=scale,
    )


def _site_of(module: ModuleLora, sites: Mapping[str, Site], digest: str) -> Site:
    site = sites.get(module.path)
    if site is None:
        raise AdapterUnavailable(f"adapter {digest}: the base model has no projection {module.path}")
    a_blocks, b_blocks = module.a_blocks, module.b_blocks
    expected = (module.rank, site.in_features // a_blocks), (site.out_features, module.rank // b_blocks)
    found = module.a.shape, module.b.shape
    if found != expected:
        raise AdapterUnavailable(f"adapter {digest}: {module.path} has shapes {found}, the base needs {expected}")
    return site


def view_pairs(memory: torch.Tensor, start: int, layout: ImageLayout) -> Mapping[int, LoraPair]:
    """Views of an image that lies in the 1-D tensor `memory` from element `start`: site index -> pair.

    On a device the kernels read tables instead, so views are made only when somebody looks at them.
    """
    views = _Views(memory, start, layout)
    return views if memory.device.type == "cuda" else MappingProxyType(dict(views))


class _Views(Mapping[int, LoraPair]):
    """Makes each view when it is asked for."""

    def __init__(self, memory: torch.Tensor, start: int, layout: ImageLayout) -> None:
        self._memory, self._start, self._layout = memory, start, layout

    @cached_property
    def _places(self) -> dict[int, PairPlace]:
        return {place.site: place for place in self._layout.places}

    def __getitem__(self, site: int) -> LoraPair:
        return _view(self._memory, self._start, self._places[site])

    @cached_property
    def max_rank(self) -> int:
        """The largest rank of any pair, without making a view."""
        return max((place.rank for place in self._layout.places), default=0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._layout.places)


def _view(memory: torch.Tensor, start: int, place: PairPlace) -> LoraPair:
    rank, width, height = place.rank, place.in_features, place.out_features
    return LoraPair(
        a=memory.as_strided((rank, width), (width, 1), start + place.a_offset),
        b=memory.as_strided((height, rank), (row_of_b(rank), 1), start + place.b_offset),
        scale=place.scale,
    )
