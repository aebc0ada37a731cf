"""Block sizes for the kernels, from the shape of the work and the size of the device. Pure.

The figures behind them: `benchmarks/gpu_kernels.py --tune`.
"""

from dataclasses import dataclass

from replica.kernels.rows import MAX_DECODE_ROWS, RowsView

MAX_PRODUCT_ROWS = 128


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """K in `splits` parts; a tile of one row takes `chunk` columns of A at a time, others blocks of `block_k`."""

    splits: int
    chunk: int
    block_k: int
    stages: int
    num_programs: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """`block_n` columns at a time."""

    block_n: int
    num_programs: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """The blocks of the product; the adapters' B takes `tiles_a_turn` tiles of rows at a time."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    tiles_a_turn: int
    b_stages: int
    num_warps: int
    max_registers: int | None = None
    """A cap on registers a thread, so that two programs fit on one multiprocessor."""


def shrink_config(rows: RowsView, num_projections: int, in_features: int, num_processors: int) -> ShrinkConfig:
    """Few tiles take K in more parts, so that the device is full whatever the batch."""
    most = max(1, min(8, in_features // 512))
    if rows.capacity <= MAX_DECODE_ROWS:
        return ShrinkConfig(most, 256, 128, 4, 8 * num_processors, 2)
    splits = min(most, max(1, 4 * num_processors // (rows.max_tiles * num_projections)))
    return ShrinkConfig(splits, 256, 128, 3, 8 * num_processors, 4)


def expand_config(num_rows: int, num_processors: int) -> ExpandConfig:
    return ExpandConfig(256 if num_rows <= MAX_DECODE_ROWS else 128, 8 * num_processors, 4)


def product_config(num_rows: int, num_out: int, in_features: int, num_processors: int) -> ProductConfig | None:
    """Wide blocks where there are many columns; None where the library's product does better."""
    if num_rows > MAX_PRODUCT_ROWS:
        return None
    block_m = next(size for size in (16, 32, 64, 128) if num_rows <= size)
    if num_out >= 128 * num_processors:
        return ProductConfig(block_m, 128, 64, 4, 4, 3, 8, 128)
    if num_out > 33 * num_processors:
        return ProductConfig(block_m, 64, 128, 4, 4, 3, 4)
    return ProductConfig(block_m, 32, 128, 6 if block_m <= 64 else 4, 4, 3, 4)
