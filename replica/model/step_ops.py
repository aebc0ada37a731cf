"""The operations of a layer that depend on the step in progress, opaque to the compiler.

A compiled layer must not read what differs between layers or steps: it would be compiled again for each value. So a
layer hands over a *handle*, a 0-d int64 tensor on the CPU (the compiler looks at a tensor's shape, not at its value),
and the operation finds behind it the record that knows the layer, the model and its step.
"""

import itertools
import weakref
from typing import Any, Protocol, cast

import torch

_LIBRARY: Any = torch.library.Library("lorafleet", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("project(Tensor x, Tensor weight, Tensor? bias, Tensor handle) -> (Tensor, Tensor)")
_LIBRARY.define("project_summed(Tensor x, Tensor weight, Tensor? bias, Tensor handle) -> Tensor")
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor handle) -> Tensor")

_records: "weakref.WeakValueDictionary[int, object]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class ProjectionRecord(Protocol):
    """What stands behind the handle of `project` and `project_summed`."""

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def project_summed(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


class AttentionRecord(Protocol):
    """What stands behind the handle of `attend`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


def make_handle(record: ProjectionRecord | AttentionRecord) -> torch.Tensor:
    """A handle by which the operations find `record`, for as long as somebody else keeps it."""
    number = next(_numbers)
    _records[number] = record
    return torch.tensor(number, dtype=torch.int64)


def project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., in] times `weight` [out, in], plus `bias`; and the share of the step's adapters. Both [..., out]."""
    return cast(tuple[torch.Tensor, torch.Tensor], torch.ops.lorafleet.project(x, weight, bias, handle))


def project_summed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor
) -> torch.Tensor:
    """The sum of the two that `project` returns."""
    return cast(torch.Tensor, torch.ops.lorafleet.project_summed(x, weight, bias, handle))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """`q` [rows, heads, dim], `k` and `v` [rows, kv_heads, dim]; returns [rows, heads, value_dim], contiguous."""
    return cast(torch.Tensor, torch.ops.lorafleet.attend(q, k, v, handle))


def _project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    record = cast(ProjectionRecord, _records[int(handle)])
    y, delta = record.project(x.reshape(-1, x.shape[-1]), weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    return y.view(shape), delta.view(shape)


def _project_summed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor
) -> torch.Tensor:
    record = cast(ProjectionRecord, _records[int(handle)])
    y = record.project_summed(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return cast(AttentionRecord, _records[int(handle)]).attend(q, k, v)


def _fake_project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


def _fake_project_summed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


_LIBRARY.impl("project", _project, "CompositeExplicitAutograd")
_LIBRARY.impl("project_summed", _project_summed, "CompositeExplicitAutograd")
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("lorafleet::project", _fake_project, lib=_LIBRARY)
torch.library.register_fake("lorafleet::project_summed", _fake_project_summed, lib=_LIBRARY)
torch.library.register_fake("lorafleet::attend", _fake_attend, lib=_LIBRARY)
