"""Whether an adapter can be held at all, under the budgets of the tiers. Touches no files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from registry.types import AdapterManifest
from replica.adapters.weights import ImageLayout, plan_layout
from replica.errors import AdapterTooLarge
from replica.model.batch import Site


@dataclass(frozen=True, slots=True)
class Budgets:
    """The largest rank, and the bytes of each tier."""

    max_rank: int
    arena_bytes: int
    host_bytes: int
    node_store_bytes: int


class ImagePlanner:
    """Plans the images of one base model and refuses what no tier budget could ever hold. Safe from any thread.

    The size of each image that was planned is known until the adapter is forgotten.
    """

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, budgets: Budgets) -> None:
        self._sites: Mapping[str, Site] = {site.path: site for site in sites}
        self._dtype = dtype
        self._budgets = budgets
        self._num_bytes: dict[str, int] = {}

    def plan(self, manifest: AdapterManifest) -> ImageLayout:
        """Raises AdapterTooLarge naming the limit, AdapterUnavailable when a module does not fit the base."""
        layout = plan_layout(manifest, self._sites, self._dtype)
        needs = (
            ("max_rank", manifest.max_rank, self._budgets.max_rank),
            ("arena_bytes", layout.num_bytes, self._budgets.arena_bytes),
            ("host_bytes", layout.num_bytes, self._budgets.host_bytes),
            ("node_store_bytes", manifest.blob_bytes, self._budgets.node_store_bytes),
        )
        for name, needed, limit in needs:
            if needed > limit:
                raise AdapterTooLarge(f"adapter {manifest.digest} needs {name} of {needed}; it is {limit}")
        self._num_bytes[manifest.digest] = layout.num_bytes
        return layout

    def num_bytes(self, digest: str) -> int | None:
        """The size of an image that was planned before."""
        return self._num_bytes.get(digest)

    def forget(self, digest: str) -> None:
        self._num_bytes.pop(digest, None)
