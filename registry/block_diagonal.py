"""BD-LoRA: which factors are block-diagonal, by PEFT's rule, and which shapes they are stored in.

A block-diagonal A (rank, in) of n blocks is stored as (rank, in / n), a B (out, rank) as (out, rank / n)
(peft.tuners.lora.variants.BdLoraLinearVariant).
"""

from dataclasses import dataclass

FIELDS = frozenset({"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"})


class BlockError(ValueError):
    """The rules and a module contradict each other."""


@dataclass(frozen=True, slots=True)
class BlockRules:
    """Names are matched anywhere in the last part of a module's path. The default leaves every factor dense."""

    num_blocks: int = 1
    a_names: tuple[str, ...] = ()
    b_names: tuple[str, ...] = ()
    strict: bool = False

    def blocks_of(self, path: str) -> tuple[int, int]:
        """Blocks of A and of B for the module at `path`. Raises BlockError."""
        name = path.rpartition(".")[2]
        in_a = any(pattern in name for pattern in self.a_names)
        in_b = any(pattern in name for pattern in self.b_names)
        if in_a and in_b:
            raise BlockError(f"{name!r} matches both target_modules_bd_a and target_modules_bd_b")
        if self.strict and not in_a and not in_b:
            raise BlockError(f"{name!r} matches neither target_modules_bd_a nor target_modules_bd_b")
        return (self.num_blocks if in_a else 1, self.num_blocks if in_b else 1)


def stored_shapes(
    rank: int, in_features: int, out_features: int, blocks: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of A and B in the file. Raises BlockError when the blocks do not divide the factors."""
    a_blocks, b_blocks = blocks
    if rank % a_blocks or in_features % a_blocks or rank % b_blocks or out_features % b_blocks:
        raise BlockError(f"{max(blocks)} blocks do not divide rank {rank} and features {in_features}, {out_features}")
    return (rank, in_features // a_blocks), (out_features, rank // b_blocks)
