"""Block sizes for the kernels, from the shape of the work and the size of the device. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """How `fused_linear_kernel` is cut; `splits` parts of K for the shrink, on `num_workers` programs."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_workers: int
    splits: int
    chunk: int
    b_stages: int
    unroll: int
    num_warps: int


def fused_config(num_rows: int, num_out: int, in_features: int, num_processors: int) -> FusedConfig:
    """The best known cut for a step of `num_rows` rows of a projection group."""
    block_m = next(size for size in (16, 32, 64, 128) if num_rows <= size)
    block_n = 64 if num_out >= 64 * num_processors else 32
    return FusedConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=128,
        stages=4,
        num_workers=num_processors,
        splits=8,
        chunk=512,
        b_stages=3,
        unroll=2,
        num_warps=4,
    )


def shrink_splits(num_programs: int, in_features: int, num_processors: int) -> int:
    """Parts of K, so that a shrink with few tiles still fills the device."""
    wanted = -(-2 * num_processors // max(num_programs, 1))
    return max(1, min(wanted, in_features // 512, 8))
