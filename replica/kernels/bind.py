"""Where each entry's adapter lies at each site: looked up once a step, read by every other kernel. Triton.

A *record* is 32 bytes: the offsets of A and B (int64, in steps of `UNIT` elements, since images are aligned: so the
compiler knows it, too), a word of `RANK_BITS` bits of rank, `FORM_BITS` of form and the part, the scale as a float32,
and the first row and the end of the tile.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from replica.kernels.rows import FORM_BITS, HEAD, ROW_STEP

_HEAD = tl.constexpr(HEAD)
_FORM_BITS = tl.constexpr(FORM_BITS)
_FORM_MASK = tl.constexpr((1 << FORM_BITS) - 1)
RANK_BITS = 9
_RANK_MASK = tl.constexpr((1 << RANK_BITS) - 1)
_FORM_UNIT = tl.constexpr(1 << RANK_BITS)
_PART_UNIT = tl.constexpr(1 << (RANK_BITS + FORM_BITS))
UNIT = tl.constexpr(32)
FAR = tl.constexpr(1 << 30)
_ROW_STEP = tl.constexpr(ROW_STEP)


@triton.jit(do_not_specialize=["capacity", "max_tiles", "max_entries", "num_sites"])
def bind_kernel(
    records, counts, words, capacity, max_tiles, max_entries, num_sites, a_offsets, b_offsets, ranks, scales,
    BLOCK: tl.constexpr, MOST_PARTS: tl.constexpr,
):  # fmt: skip
    """records[site, entry], int64 [num_sites, max_entries, 4]; those behind the last entry are not written.

    At each site the entries with a rank come first; those without, of tiles that have no adapter or whose adapter
    leaves the site alone, are the last ones. counts[site], int32 [num_sites, 4]: how many have a rank, the end of the
    last one of a form above 1, and FAR less where the first one begins, so that of sites the largest of each counts.
    Grid: (sites,).
    """
    site = tl.program_id(0)
    num_tiles = tl.minimum(tl.load(words), max_tiles)
    num_entries = tl.load(words + 1)
    num_ranked, num_others = num_entries * 0, num_entries * 0
    wide_begin, wide_end = num_entries, num_entries * 0
    for first in range(0, num_tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        exists = tile < num_tiles
        start = tl.load(words + _HEAD + tile, mask=exists, other=0)
        end = tl.load(words + _HEAD + capacity + tile, mask=exists, other=0)
        slot = tl.load(words + _HEAD + 2 * capacity + tile, mask=exists, other=-1)
        form = tl.load(words + _HEAD + 3 * capacity + tile, mask=exists, other=0)
        at = tl.maximum(slot, 0).to(tl.int64) * num_sites + site
        has_slot = slot >= 0
        rank = tl.load(ranks + at, mask=has_slot, other=0)
        scale = tl.load(scales + at, mask=has_slot, other=0.0).to(tl.int32, bitcast=True)
        a_offset = tl.load(a_offsets + at, mask=has_slot, other=0) // UNIT
        b_offset = tl.load(b_offsets + at, mask=has_slot, other=0) // UNIT
        rows = _both(start, end)
        num = tl.where(exists, 1 << form, 0)
        ranked = tl.where(rank > 0, num, 0)
        others = num - ranked
        from_start = num_ranked + tl.cumsum(ranked, 0) - ranked
        from_end = num_entries - num_others - tl.cumsum(others, 0)
        entry = tl.where(rank > 0, from_start, from_end)
        for part in tl.static_range(0, MOST_PARTS):
            out = records + (site * max_entries + entry + part) * 4
            kept = exists & ((part >> form) == 0)
            tl.store(out, a_offset, mask=kept)
            tl.store(out + 1, b_offset, mask=kept)
            tl.store(out + 2, _both(rank + form * _FORM_UNIT + part * _PART_UNIT, scale), mask=kept)
            tl.store(out + 3, rows, mask=kept)
        is_wide = (rank > 0) & (form > 1)
        wide_begin = tl.minimum(wide_begin, tl.min(tl.where(is_wide, entry, num_entries), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(is_wide, entry + num, 0), 0))
        num_ranked += tl.sum(ranked, 0)
        num_others += tl.sum(others, 0)
    tl.store(counts + 4 * site, num_ranked)
    tl.store(counts + 4 * site + 1, wide_end)
    tl.store(counts + 4 * site + 2, FAR - wide_begin)


@triton.jit
def most_of(counts, nth, site0, site1, site2, out1, out2):
    """The largest of counts[site, nth] of the projections that have columns."""
    first = tl.load(counts + 4 * site0 + nth)
    second = tl.load(counts + 4 * site1 + nth)
    third = tl.load(counts + 4 * site2 + nth)
    return tl.maximum(first, tl.maximum(tl.where(out1 > 0, second, 0), tl.where(out2 > 0, third, 0)))


@triton.jit
def _both(low, high):
    """Two int32 in one int64."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def pick(p, first, second, third):
    """The p-th of three."""
    return tl.where(p == 0, first, tl.where(p == 1, second, third))


@triton.jit
def rank_of(word):
    return word & _RANK_MASK


@triton.jit
def form_of(word):
    return word // _FORM_UNIT & _FORM_MASK


@triton.jit
def part_of(word):
    return word // _PART_UNIT


@triton.jit
def row_of_b(rank):
    """Elements from one row of B to the next, as `replica.adapters.weights.row_of_b`."""
    return (rank + _ROW_STEP - 1) // _ROW_STEP * _ROW_STEP


@triton.jit
def shrink_item(
    item, num_items, records, words32, max_entries, site0, site1, site2, P: tl.constexpr, ITEMS: tl.constexpr
):
    """(offset of A in units, word, first row, end) of a shrink's item; rank 0 beyond the last one."""
    exists = item < num_items
    record = pick(item % P, site0, site1, site2) * max_entries + item // (P * ITEMS)
    a_offset = tl.load(records + record * 4, mask=exists, other=0)
    word = tl.load(words32 + record * 8 + 4, mask=exists, other=0)
    start = tl.load(words32 + record * 8 + 6, mask=exists, other=0)
    end = tl.load(words32 + record * 8 + 7, mask=exists, other=0)
    return a_offset, word, start, end


@triton.jit
def blocks_of(out0, out1, out2, size):
    """(blocks of `size` columns of the first projection, of the first two, of all)."""
    blocks0 = tl.cdiv(out0, size)
    blocks01 = blocks0 + tl.cdiv(out1, size)
    return blocks0, blocks01, blocks01 + tl.cdiv(out2, size)


@triton.jit
def expand_item(item, num_items, records, words32, floats, max_entries, num_blocks, blocks0, blocks01, s0, s1, s2):
    """(projection, offset of B in units, word, scale, first row, end) of an expand's item; rank 0 beyond the last."""
    exists = item < num_items
    block = item % num_blocks
    p = (block >= blocks0).to(tl.int32) + (block >= blocks01).to(tl.int32)
    record = pick(p, s0, s1, s2) * max_entries + item // num_blocks
    b_offset = tl.load(records + record * 4 + 1, mask=exists, other=0)
    word = tl.load(words32 + record * 8 + 4, mask=exists, other=0)
    scale = tl.load(floats + record * 8 + 5, mask=exists, other=0.0)
    start = tl.load(words32 + record * 8 + 6, mask=exists, other=0)
    end = tl.load(words32 + record * 8 + 7, mask=exists, other=0)
    return p, b_offset, word, scale, start, end


@triton.jit
def sum_parts(t, rows, end, rank, level, scale, T_SPLIT, T_STRIDE, SPLITS: tl.constexpr, R: tl.constexpr):
    """scale t[rows, level : level + R], summed over the parts of K; 0 from row `end` and from `rank` on.

    The parts are on the way at once where registers hold them.
    """
    r = level + tl.arange(0, R)
    mask = (rows < end)[:, None] & (r < rank)[None, :]
    parts = t + rows[:, None] * T_STRIDE + r[None, :]
    total = tl.load(parts, mask=mask, other=0.0)
    if rows.shape[0] * R <= 1024:
        for split in tl.static_range(1, SPLITS):
            total += tl.load(parts + split * T_SPLIT, mask=mask, other=0.0)
    else:
        for split in range(1, SPLITS):
            total += tl.load(parts + split * T_SPLIT, mask=mask, other=0.0)
    return total * scale
