"""The cuts of the kernels: what must hold of them whatever the shape."""

import pytest
import torch

pytest.importorskip("triton")

from replica.kernels.grouped_lora import LoraKernels
from replica.kernels.rows import MAX_DECODE_ROWS, RowsView
from replica.kernels.tuning import (
    ProductConfig,
    expand_config,
    fit_product,
    product_config,
    shrink_config,
    wide_expand_config,
)
from tests.replica.kernels.adapters_in_arena import Arena

H200_PROCESSORS, H200_SHARED_BYTES = 132, 227 << 10
A100_SHARED_BYTES = 163 << 10
REGISTERS = 1 << 16
"""Of a multiprocessor."""

RANKS = [1, 8, 16, 32, 64, 128, 256]


def rows_of(capacity: int, max_rank: int) -> RowsView:
    return RowsView(torch.zeros(1, dtype=torch.int32), capacity, capacity, max_rank)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 48, 64, 65, 96, 128])
@pytest.mark.parametrize(("num_out", "in_features"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)])
def test_a_product_of_few_rows_is_ours_and_its_blocks_hold_the_rows(
    num_rows: int, num_out: int, in_features: int
) -> None:
    cut = product_config(num_rows, num_out, in_features, H200_PROCESSORS)
    assert (cut is not None) == (num_out < 28672 or num_rows <= 64 or num_rows == 128)
    if cut is not None:
        assert num_rows <= cut.block_m + cut.more
        assert cut.shared_bytes(itemsize=2) <= H200_SHARED_BYTES


@pytest.mark.parametrize(("num_rows", "num_out"), [(1, 1024), (129, 4096), (64, 57344), (112, 28672), (128, 57344)])
def test_other_products_are_the_library_s(num_rows: int, num_out: int) -> None:
    assert product_config(num_rows, num_out, 4096, H200_PROCESSORS) is None


@pytest.mark.parametrize(
    ("itemsize", "shared_bytes", "stages"),
    [
        (2, H200_SHARED_BYTES, 7),
        (2, A100_SHARED_BYTES, 6),
        (4, H200_SHARED_BYTES, 4),
        (2, 48 << 10, 2),
        (2, 40 << 10, 0),
    ],
)
def test_a_product_has_as_many_blocks_on_the_way_as_the_device_holds(
    itemsize: int, shared_bytes: int, stages: int
) -> None:
    cut = fit_product(ProductConfig(64, 32, 128, 7, 4), itemsize, shared_bytes)
    assert (0 if cut is None else cut.stages) == stages


def test_where_no_block_fits_the_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena([[8]], 192, [80], torch.float32, torch.device("cpu"))
    kernels = LoraKernels(arena.memory, arena.tables)
    assert product_config(4, 80, 192, 4) is not None
    monkeypatch.setattr(kernels, "_shared_bytes", 1 << 10)
    monkeypatch.setattr("replica.kernels.grouped_lora.product_kernel", None)
    x, weight = torch.randn(4, 192), torch.randn(80, 192)
    assert torch.equal(kernels.product(x, weight, None), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("capacity", [1, 64, 512, 513, 2048, 3000, 8192])
@pytest.mark.parametrize("num_projections", [1, 2, 3])
def test_nobody_s_rank_tells_in_how_many_parts_others_are_summed(capacity: int, num_projections: int) -> None:
    splits = {shrink_config(rows_of(capacity, rank), num_projections, 4096, H200_PROCESSORS).splits for rank in RANKS}
    assert len(splits) == 1
    assert splits <= {1, 2, 4, 8}
    assert splits.isdisjoint({1}) or capacity > MAX_DECODE_ROWS


def test_the_parts_change_only_where_the_rows_double() -> None:
    for num_projections in (1, 2, 3):
        for first in (513, 1025, 2049, 4097):
            found = {
                shrink_config(rows_of(rows, 16), num_projections, 4096, H200_PROCESSORS).splits
                for rows in range(first, 2 * first - 1)
            }
            assert len(found) == 1, (num_projections, first)


@pytest.mark.parametrize("capacity", [1, 512, 513, 8192])
@pytest.mark.parametrize("max_rank", RANKS)
def test_the_programs_of_an_expand_fit_the_registers_of_the_processors(capacity: int, max_rank: int) -> None:
    cut = expand_config(rows_of(capacity, max_rank), 6144, H200_PROCESSORS)
    assert cut.max_registers is not None
    assert cut.num_programs // H200_PROCESSORS * cut.num_warps * 32 * cut.max_registers <= REGISTERS
    assert cut.run.bit_count() == 1


def test_the_programs_of_an_expand_of_wide_ranks_fit_the_registers() -> None:
    cut = wide_expand_config(H200_PROCESSORS)
    assert cut.max_registers is not None
    assert cut.num_programs // H200_PROCESSORS * cut.num_warps * 32 * cut.max_registers <= REGISTERS
