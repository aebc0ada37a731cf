"""Block sizes for the kernels, from the shape of the work and the size of the device. Pure."""

from dataclasses import dataclass

from replica.kernels.rows import MAX_DECODE_ROWS, RowsView


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """How the two launches are cut.

    The shrink takes K in `splits` parts, a tile of one row in chunks of `chunk`, others in blocks of `block_k`; the
    expand takes `block_n` columns at a time. Both run on at most so many programs, each with so many warps.
    """

    splits: int
    chunk: int
    block_k: int
    stages: int
    shrink_programs: int
    shrink_warps: int
    block_n: int
    expand_programs: int
    expand_warps: int


def lora_config(rows: RowsView, num_projections: int, in_features: int, num_processors: int) -> LoraConfig:
    """The best known cut. Few tiles take K in more parts, so that the device is full whatever the batch."""
    most = max(1, min(8, in_features // 512))
    if rows.capacity > MAX_DECODE_ROWS:
        splits = min(most, max(1, 4 * num_processors // (rows.max_tiles * num_projections)))
        return LoraConfig(splits, 256, 128, 3, 8 * num_processors, 4, 128, 8 * num_processors, 4)
    return LoraConfig(most, 256, 128, 4, 4 * num_processors, 4, 256, 8 * num_processors, 4)


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How `product_kernel` is cut."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


MAX_PRODUCT_ROWS = 128


def product_config(num_rows: int, num_out: int, in_features: int, num_processors: int) -> ProductConfig | None:
    """The best known cut for few rows; None where the library does better."""
    if num_rows > MAX_PRODUCT_ROWS:
        return None
    block_m = next(size for size in (16, 32, 64, 128) if num_rows <= size)
    return ProductConfig(block_m, 64 if num_out >= 96 * num_processors else 32, 128, 4, 4)
