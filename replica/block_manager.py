"""Who holds which KV block. Knows counts, not contents: no tokens, no tensors, no sequences."""

from collections import Counter
from collections.abc import Iterable, Sequence

from replica.prefix_index import Key, PrefixIndex

BlockTable = tuple[int, ...]


class BlockManager:
    """Hands out the blocks of one KV cache under reference counts.

    A block table that `allocate` or `share` returned is a lease: give it back once, with `release`. A shared block
    must be full, since nobody may write to a block that others read.

    A published block that nobody holds keeps its contents until its room is needed: it counts as free, and `find`
    gives it out again.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._index = PrefixIndex()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks

    def __repr__(self) -> str:
        return f"BlockManager(free={self.num_free}/{self.num_blocks}, block_size={self.block_size})"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that keep something to be found again among them."""
        return len(self._free) + self._index.num_idle

    @property
    def num_kept(self) -> int:
        """The free blocks that keep something."""
        return self._index.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> BlockTable:
        """Take `num_blocks` free blocks for one holder; ask `can_allocate` first."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked of {self}"
        blocks = tuple(self._free.pop() if self._free else self._index.give_up() for _ in range(num_blocks))
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> BlockTable:
        """Add a holder to blocks that are in use."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is free"
            self._num_holders[block] += 1
        return tuple(blocks)

    def publish(self, block: int, key: Key) -> None:
        """Let others find a held, full block whose contents will be there when their steps run."""
        assert self._num_holders[block] > 0, f"block {block} is free"
        self._index.publish(block, key)

    def find(self, keys: Iterable[Key]) -> BlockTable:
        """Become a holder of the blocks of the longest published beginning of `keys`."""
        blocks = self._index.longest(keys)
        for block in blocks:
            self._index.use(block)
            self._num_holders[block] += 1
        return tuple(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """Let nobody find these held blocks again."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is free"
            self._index.forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one holder's blocks; those without a holder are free again, the end of a table first to go."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, f"block {block} released twice"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0 and not self._index.keep(block):
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that `tables`, one a holder, explain every count and that no block is lost or doubly free."""
        holders = Counter(block for table in tables for block in table)
        counted = {block: count for block, count in enumerate(self._num_holders) if count}
        assert holders == counted, f"block tables say {dict(holders)}, counts say {counted}"
        self._index.check_integrity(set(counted))
        free = set(self._free) | self._index.idle()
        assert len(free) == self.num_free, "a block is twice free"
        assert free == set(range(self.num_blocks)) - counted.keys(), "free list and counts disagree"
