"""Projections of the base that add the step's LoRA pairs. They know nothing of adapters' names or of slots."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from replica.kernels.reference import SiteSegment, grouped_lora
from replica.model.batch import LoraSegment, Site

GroupedLora = Callable[[torch.Tensor, torch.Tensor, Sequence[SiteSegment]], None]
"""The signature of `replica.kernels.reference.grouped_lora`."""


class LoraStep:
    """The segments of the step in progress, by site. One object is shared by all LoraLinear modules of one base."""

    def __init__(self, kernel: GroupedLora = grouped_lora) -> None:
        self.kernel = kernel
        self.by_site: Mapping[int, Sequence[SiteSegment]] = {}

    def __repr__(self) -> str:
        return f"LoraStep(num_sites={len(self.by_site)})"

    @contextmanager
    def running(self, segments: Sequence[LoraSegment]) -> Iterator[None]:
        """Hand `segments` to the projections for the length of one forward."""
        assert not self.by_site, "one forward at a time"
        self.by_site = segments_by_site(segments)
        try:
            yield
        finally:
            self.by_site = {}


def segments_by_site(segments: Sequence[LoraSegment]) -> dict[int, list[SiteSegment]]:
    """Turn segments with pairs a site into, for each site that any adapter touches, its rows and pairs."""
    by_site: defaultdict[int, list[SiteSegment]] = defaultdict(list)
    for segment in segments:
        for index, pair in segment.pairs.items():
            by_site[index].append((segment.start, segment.end, pair))
    return dict(by_site)


class LoraLinear(nn.Module):
    """A base projection (Linear or Conv1D), kept as it is, plus the LoRA pairs of the step's rows."""

    def __init__(self, base_layer: nn.Module, site: Site, step: LoraStep) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.site = site
        self._index = site.index
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [..., in] with the packed rows in order; returns [..., out]."""
        y: torch.Tensor = self.base_layer(x)
        segments = self._step.by_site.get(self._index)
        if segments is not None:
            self._step.kernel(y.view(-1, self.site.out_features), x.reshape(-1, self.site.in_features), segments)
        return y
