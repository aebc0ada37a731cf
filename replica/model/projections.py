"""Sibling projections that read one input, merged into one product. They know nothing of steps and adapters.

The merged weight holds its members' rows one after another, and the members' parameters are views of it. The first
member that is called computes for all; what it computed waits in a stash until the last member has taken its share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from replica.kernels.groups import GroupShape
from replica.model.batch import Site
from replica.model.step_ops import make_handle, project, project_summed
from replica.model.step_state import GroupOfModel, StepState

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that read the same input in the architectures we know, in the order they are called."""


@dataclass(frozen=True, slots=True)
class Call:
    """One projection's turn in a forward: its path, and the tensor that it read."""

    path: str
    x: torch.Tensor


class Stash:
    """What a group's first member computed, for the others; empty between groups."""

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.y: torch.Tensor | None = None
        self.delta: torch.Tensor | None = None

    def put(self, x: torch.Tensor | None, y: torch.Tensor | None, delta: torch.Tensor | None) -> None:
        """What was read, its product, and the adapters' share of it where the step has any."""
        self.x, self.y, self.delta = x, y, delta


class GroupLeader(nn.Module):
    """The first member of a group, and the only one that computes: the merged product."""

    def __init__(self, base_layer: nn.Module, record: GroupOfModel, stash: Stash | None) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.record, self.stash, self.step = record, stash, record.state
        self.width = record.shape.out_features[0]
        self.handle = make_handle(record)
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [..., in]; returns this member's [..., width]."""
        delta = None
        if self.step.sums_lora:
            y = project_summed(x, self.weight, self.bias, self.handle)
        elif self.step.has_lora:
            y, delta = project(x, self.weight, self.bias, self.handle)
        else:
            y = functional.linear(x, self.weight, self.bias)
        if self.stash is not None:
            self.stash.put(x, y, delta)
        return _columns(y, delta, 0, self.width)


class GroupFollower(nn.Module):
    """A later member: takes columns [start, end) of what the leader computed from the same tensor."""

    def __init__(self, base_layer: nn.Module, stash: Stash, start: int, end: int, is_last: bool) -> None:
        super().__init__()
        self.base_layer, self.stash = base_layer, stash
        self.start, self.end, self.is_last = start, end, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is the tensor that the leader was called with."""
        y, delta = self.stash.y, self.stash.delta
        assert y is not None and self.stash.x is x, "a projection group was called out of turn"  # noqa: PT018
        if self.is_last:
            self.stash.put(None, None, None)
        return _columns(y, delta, self.start, self.end)


def _columns(y: torch.Tensor, delta: torch.Tensor | None, start: int, end: int) -> torch.Tensor:
    """Columns [start, end) of the sum; added after the cut, so that compiled code adds where it reads."""
    columns = y[..., start:end]
    return columns if delta is None else columns + delta[..., start:end]


def group_sites(model: nn.Module, sites: Sequence[Site], calls: Sequence[Call]) -> list[tuple[Site, ...]]:
    """Split `sites` into groups; siblings are one only where `calls` shows them side by side on one tensor."""
    turn = {call.path: place for place, call in enumerate(calls)}
    by_path = {site.path: site for site in sites}
    groups, grouped = [], set()
    for site in sites:
        if site.path in grouped:
            continue
        members = next(_candidates(site, by_path), (site,))
        if not _are_mergeable(model, members) or not _read_one_tensor(members, calls, turn):
            members = (site,)
        groups.append(members)
        grouped |= {member.path for member in members}
    return groups


def _candidates(site: Site, by_path: dict[str, Site]) -> Iterator[tuple[Site, ...]]:
    parent, _, name = site.path.rpartition(".")
    for names in SIBLINGS:
        paths = [f"{parent}.{sibling}" for sibling in names]
        if name in names and all(path in by_path for path in paths):
            yield tuple(by_path[path] for path in paths)


def _are_mergeable(model: nn.Module, members: Sequence[Site]) -> bool:
    modules = [model.get_submodule(site.path) for site in members]
    kinds = {(type(module), module.weight.dtype, module.bias is None) for module in modules}
    return len(kinds) == 1 and (len(members) == 1 or type(modules[0]) is nn.Linear)


def _read_one_tensor(members: Sequence[Site], calls: Sequence[Call], turn: dict[str, int]) -> bool:
    if any(site.path not in turn for site in members):
        return False
    first = turn[members[0].path]
    return all(
        turn[site.path] == first + place and calls[turn[site.path]].x is calls[first].x
        for place, site in enumerate(members)
    )


def install_groups(model: nn.Module, groups: Sequence[Sequence[Site]], state: StepState) -> None:
    """Put leaders and followers in the places of the sites' modules."""
    for members in groups:
        _install(model, members, state)


def _install(model: nn.Module, members: Sequence[Site], state: StepState) -> None:
    modules = [model.get_submodule(site.path) for site in members]
    shape = GroupShape(
        sites=tuple(site.index for site in members),
        out_features=tuple(site.out_features for site in members),
        in_features=members[0].in_features,
    )
    record = GroupOfModel(state, shape)
    stash = Stash() if len(members) > 1 else None
    leader = GroupLeader(modules[0], record, stash)
    leader.weight, leader.bias = _merge(modules)
    model.set_submodule(members[0].path, leader)
    start = shape.out_features[0]
    for place, (site, module) in enumerate(zip(members[1:], modules[1:], strict=True), start=2):
        assert stash is not None
        end = start + site.out_features
        model.set_submodule(site.path, GroupFollower(module, stash, start, end, place == len(members)))
        start = end


def _merge(modules: Sequence[nn.Module]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight [sum(out), in] and one bias, whose parts become the modules' own; nothing is kept twice."""
    if len(modules) == 1:
        weight, bias = _parameter(modules[0], "weight"), _parameter(modules[0], "bias")
        assert weight is not None
        return (weight.t() if isinstance(modules[0], Conv1D) else weight), bias
    weight, bias = (_merge_parameter(modules, name) for name in ("weight", "bias"))
    assert weight is not None
    return weight, bias


def _merge_parameter(modules: Sequence[nn.Module], name: str) -> torch.Tensor | None:
    parts = [part for part in (_parameter(module, name) for module in modules) if part is not None]
    if not parts:
        return None
    merged = torch.cat(parts)
    for module, part in zip(modules, torch.split(merged, [len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    return merged


def _parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module.get_parameter(name) if getattr(module, name) is not None else None
    return None if parameter is None else parameter.detach()
