"""Which full KV blocks hold what, so that a later sequence with the same beginning need not compute it again.

Knows keys and block numbers, not counts or tensors. A key is a chain: hash(key of the block before, tokens of this
one), from a root that names tenant and adapter digest. So equal keys mean equal contents, and nothing is ever shared
across tenants, adapters or versions of one.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

Key = bytes

KEY_BYTES = 16


def root_key(tenant: str, adapter: str | None) -> Key:
    """The key before a sequence's first block. `adapter` is a version's digest."""
    return hashlib.blake2b(json.dumps([tenant, adapter]).encode(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[Key], root: Key, tokens: Items[int], block_size: int, num_blocks: int) -> None:
    """Append the keys of full blocks until there are `num_blocks`; those that are there are not computed again."""
    for index in range(len(keys), num_blocks):
        parent = keys[-1] if keys else root
        content = array("q", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        keys.append(hashlib.blake2b(parent + content, digest_size=KEY_BYTES).digest())


class PrefixIndex:
    """Block by key, and the blocks nobody holds in the order in which they are given up: least recently used first."""

    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._blocks)} blocks, {self.num_idle} idle)"

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[tuple[Key, int]]:
        return iter(self._blocks.items())

    def longest(self, keys: Iterable[Key]) -> list[int]:
        """The blocks of the longest known beginning of `keys`."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, key: Key) -> None:
        """Let others find a held block. One that holds the same already stays the one that is found."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def use(self, block: int) -> None:
        """Somebody holds the block (again)."""
        self._idle.pop(block, None)

    def keep(self, block: int) -> bool:
        """Nobody holds the block any more; whether it is kept for later finders."""
        if block in self._keys:
            self._idle[block] = None
            return True
        return False

    def give_up(self) -> int:
        """The idle block that was used longest ago, forgotten."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Let nobody find the block again; it is not idle from now on."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
        self._idle.pop(block, None)

    def check_integrity(self, held: set[int]) -> None:
        """Assert that what can be found is held or idle, never both."""
        assert {key: block for block, key in self._keys.items()} == self._blocks
        assert self._idle.keys() == self._keys.keys() - held, f"{self} and holders of {held}"

    def idle(self) -> set[int]:
        return set(self._idle)
