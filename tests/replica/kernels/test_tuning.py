"""The cuts of the kernels: what must hold of them whatever the shape."""

import pytest
import torch

pytest.importorskip("triton")

from replica.kernels.grouped_lora import LoraKernels
from replica.kernels.groups import GroupShape
from replica.kernels.rows import RowsView
from replica.kernels.tuning import expand_config, product_config, shrink_config
from tests.replica.kernels.adapters_in_arena import Arena

H200_PROCESSORS, H200_SHARED_BYTES = 132, 227 << 10


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 128, 129])
@pytest.mark.parametrize("num_out", [1024, 4096, 6144, 28672])
@pytest.mark.parametrize("in_features", [4096, 14336])
def test_blocks_of_a_product_hold_its_rows_and_fit_a_multiprocessor(
    num_rows: int, num_out: int, in_features: int
) -> None:
    cut = product_config(num_rows, num_out, in_features, H200_PROCESSORS)
    if cut is not None:
        assert num_rows <= cut.block_m
        assert cut.shared_bytes(itemsize=2) <= H200_SHARED_BYTES


def test_a_device_with_less_shared_memory_takes_the_library_s_product(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena([[8]], 192, [80], torch.float32, torch.device("cpu"))
    kernels = LoraKernels(arena.memory, arena.tables)
    assert product_config(4, 80, 192, 4) is not None
    monkeypatch.setattr(kernels, "_shared_bytes", 1 << 10)
    monkeypatch.setattr("replica.kernels.grouped_lora.product_kernel", None)
    x, weight = torch.randn(4, 192), torch.randn(80, 192)
    assert torch.equal(kernels.product(x, weight, None), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("capacity", [1, 64, 512, 513, 2048, 8192])
@pytest.mark.parametrize("max_rank", [1, 8, 16, 32, 64, 128, 256])
def test_parts_of_k_are_a_power_of_two_and_a_step_of_few_rows_has_two_at_least(capacity: int, max_rank: int) -> None:
    rows = RowsView(torch.zeros(1, dtype=torch.int32), capacity, capacity, max_rank)
    group = GroupShape((0, 1, 2), (4096, 1024, 1024), 4096)
    cut = shrink_config(rows, len(group.sites), group.in_features, H200_PROCESSORS)
    assert cut.splits.bit_count() == 1
    assert cut.splits >= 2 or not rows.is_decode
    wide = expand_config(rows, group.num_out, H200_PROCESSORS)
    assert wide.run >= 1
    assert wide.num_warps * 32 * (wide.max_registers or 0) * wide.num_programs // H200_PROCESSORS <= 1 << 16
