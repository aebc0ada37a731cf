"""A device that runs behind the host, on the CPU: its tensors cannot be read except through what the link fetched."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from replica.device_link import Fetched
from replica.model.batch import ForwardBatch
from tests.fakes import FakeModel

HOST_READS: set[Any] = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.masked_select,
    torch.equal,
    torch.unique,
}
"""What would wait for a real device."""


class DeviceTensor(torch.Tensor):
    """A tensor that is not on the host: reading a value of it, or choosing a shape by one, is an error."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        assert func not in HOST_READS, f"{func.__name__} waits for the device"
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            masks = [each for each in places if isinstance(each, torch.Tensor) and each.dtype is torch.bool]
            assert not masks, "a mask as an index waits for the device"
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: torch.Tensor) -> DeviceTensor:
    return tensor.as_subclass(DeviceTensor)


class FakeLink:
    """Notes in `log` what was launched and what was waited for, by the number of the step."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.num_launched = 0

    def launch(self) -> None:
        self.num_launched += 1
        self.log.append(("launch", self.num_launched))

    def send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return on_device(torch.tensor(values, dtype=dtype))

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        copies = tuple(tensor.as_subclass(torch.Tensor).clone() for tensor in tensors)
        assert all(isinstance(tensor, DeviceTensor) for tensor in tensors), "fetched what is on the host"
        return Fetched(copies, _Moment(self, self.num_launched))


class _Moment:
    """The end of a step's work."""

    def __init__(self, link: FakeLink, step: int) -> None:
        self._entry = ("read", step)
        self._log = link.log

    def synchronize(self) -> None:
        if self._entry not in self._log:
            self._log.append(self._entry)


class AsyncFakeModel(FakeModel):
    """FakeModel behind a FakeLink; each forward overwrites the logits of the one before."""

    MAX_ROWS = 256

    def __init__(self, link: FakeLink, **fields: Any) -> None:
        super().__init__(**fields)
        self._link = link
        self._buffer = torch.full((self.MAX_ROWS, self.vocab_size), torch.nan)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self._link.launch()
        names = ("token_ids", "positions", "logit_rows")
        on_host = {name: getattr(batch, name).as_subclass(torch.Tensor) for name in names}
        assert all(isinstance(getattr(batch, name), DeviceTensor) for name in names)
        logits = super().forward(replace(batch, **on_host))
        self._buffer.fill_(torch.nan)
        self._buffer[: len(logits)] = logits
        return on_device(self._buffer[: len(logits)])
