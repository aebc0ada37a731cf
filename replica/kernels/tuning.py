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
    """The blocks of a base product of few rows."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


def shrink_config(rows: RowsView, num_projections: int, in_features: int, num_processors: int) -> ShrinkConfig:
    """Few tiles take K in more parts, so that the device is full whatever the batch."""
    most = max(1, min(8, in_features // 512))
    if rows.capacity <= MAX_DECODE_ROWS:
        return ShrinkConfig(most, 256, 128, 4, 8 * num_processors, 2)
    splits = min(most, max(1, 4 * num_processors // (rows.max_tiles * num_projections)))
    return ShrinkConfig(splits, 256, 128, 3, 8 * num_processors, 4)


def expand_config(num_rows: int, num_out: int, num_processors: int) -> ExpandConfig:
    """Wide blocks where there are many columns; as many programs as run at once, since each has its next load ahead."""
    if num_rows > MAX_DECODE_ROWS:
        return ExpandConfig(128, 2 * num_processors, 4)
    if num_out > 64 * num_processors:
        return ExpandConfig(512, 2 * num_processors, 4)
    return ExpandConfig(256, 3 * num_processors, 4)


def product_config(num_rows: int, num_out: int, num_processors: int) -> ProductConfig | None:
    """For few rows and about as many columns as make one round of small blocks; None: the library does better."""
    if num_rows > MAX_PRODUCT_ROWS or not 16 * num_processors < num_out <= 32 * num_processors:
        return None
    block_m = next(size for size in (16, 32, 64, 128) if num_rows <= size)
    return ProductConfig(block_m, 32, 128, 6 if block_m <= 64 else 4, 4)
