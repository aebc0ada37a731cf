"""Block sizes for the kernels, from the shape of the work and the size of the device. Pure.

The figures behind them: `benchmarks/gpu_kernels.py`, of 64 rows with `--tune`.
"""

from dataclasses import dataclass, replace

from replica.kernels.rows import RowsView

PRODUCT_ROWS = ((16, 0), (64, 0), (64, 16), (64, 32), (128, 0))
"""For how many rows there are products of our own: so many, and so many more."""

MOST_BY_ROWS = 64
"""Products of more rows are computed by columns."""

MOST_ROUNDS = 2
"""A product of our own is for as many blocks as the processors take in so many rounds."""

LONG_PRODUCT = 8192
"""From so many input features on, one more block on the way pays."""

EXPAND_LINES = 256
"""Lines of 16 values of B that a program of the expand takes at a time, in a step of few rows."""

EXPAND_COLUMNS = 128
"""The same in a step of many rows: columns."""

MAX_RUN = 8
"""The most such blocks of columns that share a tile's sum over the parts of K."""


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
    """`block_n` columns at a time, `run` blocks to an item, `stages` of them on the way; or so many lines, in a step of
    few rows.

    `max_registers` a thread, None as many as the compiler likes.
    """

    block_n: int
    num_programs: int
    num_warps: int
    max_registers: int | None = None
    run: int = 1
    stages: int = 3


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """The blocks of a base product of `block_m + more` rows, by `parts` programs each, 1 or 2: see `product.py`."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    more: int = 0
    parts: int = 1

    @property
    def by_columns(self) -> bool:
        return self.block_m + self.more > MOST_BY_ROWS

    def shared_bytes(self, itemsize: int) -> int:
        """What a program's blocks take of a multiprocessor's shared memory."""
        return (self.block_m + self.more + self.block_n) * self.block_k * self.stages * itemsize


def shrink_config(rows: RowsView, num_projections: int, in_features: int, num_processors: int) -> ShrinkConfig:
    """Few tiles take K in more parts, a power of two, so that the device is full whatever the batch.

    Nobody's rank tells the number of parts, as that would tell in which order the others' values are summed; nor does
    every number of rows, as each number of parts is a kernel to compile.
    """
    most = max(2, min(8, in_features // 512))
    if rows.is_decode:
        return ShrinkConfig(_power_of_two(most), 128, 4, 8 * num_processors, 2)
    num_tiles = 2 * _power_of_two(rows.capacity - 1) // rows.tile_rows
    wanted = max(1, 2 * num_processors // (num_tiles * num_projections))
    return ShrinkConfig(_power_of_two(min(most, wanted)), 128, 3, 8 * num_processors, 4)


def expand_config(rows: RowsView, num_out: int, num_processors: int) -> ExpandConfig:
    """As few warps and registers as an item needs, so that many programs share a processor.

    In a step of few rows instructions are what counts, and most of an item's are the same for each warp, so there are
    two. Items of many rows have so many blocks that each program has several items.
    """
    if rows.is_decode:
        return ExpandConfig(EXPAND_LINES, 6 * num_processors, 2, 168)
    num_programs = 3 * num_processors
    num_blocks = -(-rows.capacity // rows.tile_rows) * num_out // EXPAND_COLUMNS
    run = _power_of_two(max(1, min(MAX_RUN, num_blocks // (2 * num_programs))))
    return ExpandConfig(EXPAND_COLUMNS, num_programs, 4, 160, run)


def wide_expand_config(num_processors: int) -> ExpandConfig:
    """For ranks above 16 in a step of few rows."""
    return ExpandConfig(2 * EXPAND_LINES, 3 * num_processors, 4, 168)


def product_config(num_rows: int, num_out: int, in_features: int, num_processors: int) -> ProductConfig | None:
    """Blocks of so many columns that they make about one round, or two, and leave some processors to LoRA.

    None, for the library's product, where ours was slower or was not tried: few columns, very many, or many rows.
    """
    if num_rows > sum(PRODUCT_ROWS[-1]) or num_out <= 16 * num_processors:
        return None
    if num_rows > MOST_BY_ROWS:
        return _product_by_columns(num_rows, num_out, in_features, num_processors)
    block_m, _ = _block_rows(num_rows)
    if num_out <= 32 * num_processors:
        return ProductConfig(block_m, 32, 128, 6 if in_features < LONG_PRODUCT else 7, 4)
    if num_out <= 64 * num_processors:
        return ProductConfig(block_m, 64, 128, 5, 4)
    return ProductConfig(block_m, 128, 128, 4, 4) if num_out <= MOST_ROUNDS * 128 * num_processors else None


def _product_by_columns(num_rows: int, num_out: int, in_features: int, num_processors: int) -> ProductConfig | None:
    """Of more than 64 rows. Of many columns only for 128 rows, which need no masks, and in one round of blocks.

    With smaller blocks of K, few columns of up to 128 rows leave more of a processor's memory to LoRA's programs.
    """
    block_m, more = _block_rows(num_rows)
    if num_out > 64 * num_processors:
        is_one_round = num_out <= 256 * num_processors
        return ProductConfig(block_m, 256, 64, 4, 8) if num_rows == 128 and is_one_round else None
    if num_out > 32 * num_processors:
        return ProductConfig(block_m, 64, 128, 4, 4, more)
    if more == 0:
        return ProductConfig(block_m, 64, 64, 5 if in_features < LONG_PRODUCT else 7, 4, parts=2)
    return ProductConfig(block_m, 64, 128, 4, 4, more, parts=2)


def _block_rows(num_rows: int) -> tuple[int, int]:
    return next(rows for rows in PRODUCT_ROWS if num_rows <= sum(rows))


def fit_product(cut: ProductConfig, itemsize: int, shared_bytes: int) -> ProductConfig | None:
    """The same with as many blocks on the way as a program's shared memory holds; None where that is not two."""
    stages = min(cut.stages, shared_bytes // replace(cut, stages=1).shared_bytes(itemsize))
    return replace(cut, stages=stages) if stages >= 2 else None


def _power_of_two(number: int) -> int:
    """The largest that is no more than `number`."""
    return 1 << (number.bit_length() - 1)
