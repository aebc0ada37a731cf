"""Small host values to the device and small results back, neither side waiting for the other. Knows no models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A moment of the device's work."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Copies on the host that are whole once `event` has passed; without one they are there already."""

    tensors: tuple[torch.Tensor, ...]
    event: Event | None = None

    def lists(self) -> list[list[Any]]:
        """Each tensor as (nested) lists; waits for the device if it must."""
        if self.event is not None:
            self.event.synchronize()
        return [tensor.tolist() for tensor in self.tensors]


class DeviceLink(Protocol):
    """The way to the model's device and back, in the order of its stream."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether work is queued there while the host goes on, so that reading a result at once is waiting for it."""

    def send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """`values`, (nested) lists of one shape, as a new tensor on the device; does not wait for the device."""

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Begin to copy `tensors` to the host; what is queued later may overwrite them."""


class HostLink:
    """The model computes on the host: everything is there as soon as it is asked for."""

    is_asynchronous = False

    def send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        return Fetched(tensors)


class CudaLink:
    """Copies through pinned memory on the current stream. Pinned blocks are reused once their copy has passed."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __repr__(self) -> str:
        return f"CudaLink({self._device})"

    def send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        copies = tuple(self._begin_copy(tensor) for tensor in tensors)
        return Fetched(copies, torch.cuda.current_stream(self._device).record_event())

    def _begin_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def link_to(device: torch.device) -> DeviceLink:
    """The link to where a model computes."""
    return CudaLink(device) if device.type == "cuda" else HostLink()
