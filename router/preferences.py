"""Each adapter's replicas in order of preference: weighted rendezvous hashing, many names at once.

Rendezvous hashing: Thaler and Ravishankar, 1998; its weights: Schindelhauer and Schomaker, 2005.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Row = tuple[int, ...]
"""Indices of members, the most preferred first."""

MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A replica on the ring. `ring_id` outlives restarts, so it decides; `replica_id` only breaks ties.

    A member of twice the `weight` gets twice the homes and twice the load. It holds `num_slots` adapters at once; 0 if
    nobody knows how many.
    """

    ring_id: int
    replica_id: str
    weight: float = 1.0
    num_slots: int = 0


def hash64(text: str) -> int:
    """64 bits of blake2b, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def scores(name_hashes: Sequence[int], members: Sequence[Member]) -> npt.NDArray[np.uint64]:
    """64 even bits for each pair, (names, members): both hashes under splitmix64's finalizer."""
    names = np.array(name_hashes, dtype=np.uint64).reshape(-1, 1)
    places = np.array([hash64(str(member.ring_id)) for member in members], dtype=np.uint64).reshape(1, -1)
    mixed = names ^ places
    mixed = (mixed ^ (mixed >> np.uint64(30))) * MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def rows(name_hashes: Iterable[int], members: Sequence[Member]) -> list[Row]:
    """The preferences of each name. A member that joins or grows only ever moves forward in them."""
    hashes = list(name_hashes)
    if not hashes or not members:
        return [() for _ in hashes]
    drawn = scores(hashes, members)
    if len({member.weight for member in members}) == 1:
        keys: npt.NDArray[np.uint64] | npt.NDArray[np.float64] = ~drawn
    else:
        uniform = (drawn.astype(np.float64) + 0.5) / 2.0**64
        keys = -np.log(uniform) / np.array([member.weight for member in members])
    return [tuple(row) for row in np.argsort(keys, axis=1, kind="stable").tolist()]
