"""Block sizes for the kernels, from the shape of the work and the size of the device. Pure.

The figures behind them: `benchmarks/gpu_kernels.py --tune`.
"""

from dataclasses import dataclass

from replica.kernels.rows import RowsView

MAX_PRODUCT_ROWS = 128
LONG_PRODUCT = 8192
"""From so many input features on, one more block on the way pays."""

EXPAND_LINES = 256
"""Lines of 16 values of B that a program of the expand takes at a time, in a step of few rows."""

EXPAND_COLUMNS = 128
"""The same in a step of many rows: columns."""

MAX_RUN = 8
"""The most such blocks of columns that share a tile's sum over the parts of K."""

MAX_PARTS_BY_RANK = 128
"""Parts of K by rank in a step of many rows: the expand has them all on the way at once."""


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """K in `splits` parts, in blocks of `block_k`, `stages` of which are on the way."""

    splits: int
    block_k: int
    stages: int
    num_programs: int
    num_warps: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """`block_n` columns at a time, `run` blocks to an item; or so many lines, in a step of few rows.

    `max_registers` a thread, None as many as the compiler likes.
    """

    block_n: int
    num_programs: int
    num_warps: int
    max_registers: int | None = None
    run: int = 1


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """The blocks of a base product of few rows."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int

    def shared_bytes(self, itemsize: int) -> int:
        """What a program's blocks take of a multiprocessor's shared memory."""
        return (self.block_m + self.block_n) * self.block_k * self.stages * itemsize


def shrink_config(rows: RowsView, num_projections: int, in_features: int, num_processors: int) -> ShrinkConfig:
    """Few tiles take K in more parts, a power of two, so that the device is full whatever the batch."""
    most = max(2, min(8, in_features // 512))
    if rows.is_decode:
        return ShrinkConfig(1 << (most.bit_length() - 1), 128, 4, 8 * num_processors, 2)
    num_tiles = -(-rows.capacity // rows.tile_rows)
    wanted = max(1, 2 * num_processors // (num_tiles * num_projections))
    splits = min(most, wanted, MAX_PARTS_BY_RANK // rows.rank_block)
    return ShrinkConfig(1 << (splits.bit_length() - 1), 128, 3, 8 * num_processors, 4)


def expand_config(rows: RowsView, num_out: int, num_processors: int) -> ExpandConfig:
    """As few warps and registers as an item needs, so that many programs share a processor.

    In a step of few rows instructions are what counts, and most of an item's are the same for each warp, so there are
    two; ranks above 16 need more registers. Items of many rows have as many blocks as leave each program some.
    """
    if rows.is_decode and rows.most_form <= 1:
        return ExpandConfig(EXPAND_LINES, 6 * num_processors, 2, 168)
    if rows.is_decode:
        return ExpandConfig(EXPAND_LINES, 5 * num_processors, 2, 200)
    num_programs = 3 * num_processors
    num_blocks = -(-rows.capacity // rows.tile_rows) * num_out // EXPAND_COLUMNS
    run = max(1, min(MAX_RUN, num_blocks // (2 * num_programs)))
    return ExpandConfig(EXPAND_COLUMNS, num_programs, 4, 160, run)


def product_config(num_rows: int, num_out: int, in_features: int, num_processors: int) -> ProductConfig | None:
    """Blocks of as many columns as make one round, or two, that leaves some processors to LoRA; None: the library's.

    Of many rows ours is as fast as the library's only where the columns are few.
    """
    if num_rows > MAX_PRODUCT_ROWS or num_out <= 16 * num_processors:
        return None
    block_m = next(size for size in (16, 64, 128) if num_rows <= size)
    if num_out <= 32 * num_processors:
        stages = 4 if block_m > 64 else 6 if in_features < LONG_PRODUCT else 7
        return ProductConfig(block_m, 32, 128, stages, 4)
    if block_m > 64:
        return None
    return (
        ProductConfig(block_m, 64, 128, 5, 4)
        if num_out <= 64 * num_processors
        else ProductConfig(block_m, 128, 128, 4, 4)
    )
