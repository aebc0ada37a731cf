"""Who holds which KV block. Knows counts, not contents: no tokens, no tensors, no sequences."""

from collections import Counter
from collections.abc import Iterable, Sequence

BlockTable = tuple[int, ...]


class BlockManager:
    """Hands out the blocks of one KV cache under reference counts.

    A block table that `allocate` or `share` returned is a lease: give it back once, with `release`. A shared block
    must be full, since nobody may write to a block that others read.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks

    def __repr__(self) -> str:
        return f"BlockManager(free={self.num_free}/{self.num_blocks}, block_size={self.block_size})"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> BlockTable:
        """Take `num_blocks` free blocks for one holder; ask `can_allocate` first."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked of {self}"
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> BlockTable:
        """Add a holder to blocks that are in use."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is free"
            self._num_holders[block] += 1
        return tuple(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one holder's blocks; those without a holder are free again."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} released twice"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that `tables`, one a holder, explain every count and that no block is lost or doubly free."""
        holders = Counter(block for table in tables for block in table)
        counted = {block: count for block, count in enumerate(self._num_holders) if count}
        assert holders == counted, f"block tables say {dict(holders)}, counts say {counted}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert free == set(range(self.num_blocks)) - counted.keys(), "free list and counts disagree"
