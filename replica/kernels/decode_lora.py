"""The two halves of grouped LoRA for steps of few rows, most of them of another tenant: t = A x, then d = scale B t.

They run beside the base product, which leaves them few multiprocessors, so what counts is how many bytes each has on
the way and how few instructions those cost. So a program works on items that all take as many bytes, whatever the
rank: an adapter of another rank is read as if it had 16 (`form`, see `rows.py`). With rank 8 or less a line of 16
values holds two columns of B, and A comes as two parts of K; with 32, a line is half a column. The shrink uses the
matrix units whatever the number of rows, as that takes few registers; so does the expand of adapters with a rank above
16, a kernel of its own, as its programs need registers that the others would lack. For others the expand sums products
where a tile has few rows (decode, each another tenant). What an adapter leaves alone, the shrink sets to zero.

Each value is summed in one order: no atomics, and results do not depend on timing or neighbours. What is computed is
that of Punica and S-LoRA (arXiv:2310.18547, arXiv:2311.03285).
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from replica.kernels.bind import (
    FAR,
    UNIT,
    blocks_of,
    expand_item,
    form_of,
    most_of,
    part_of,
    pick,
    rank_of,
    row_of_b,
    shrink_item,
    sum_parts,
)

LINE = tl.constexpr(16)
HALF = tl.constexpr(8)
ZEROS = tl.constexpr(512)
"""How many columns are set to zero at a time."""


@triton.jit
def _store_zeros(row, first, last):
    for column in range(first, last, ZEROS):
        columns = column + tl.arange(0, ZEROS)
        tl.store(row + columns, tl.zeros([ZEROS], dtype=row.dtype.element_ty), mask=columns < last)


@triton.jit(do_not_specialize=["max_entries", "site0", "site1", "site2"])
def decode_shrink_kernel(
    x, t, d, memory, records, words32, words, max_entries, site0, site1, site2, out0, out1, out2, K, split_k,
    T_SPLIT, T_STRIDE, R_MAX,
    P: tl.constexpr, SPLITS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t[split, row, p R_MAX + r] = A_p[r] x[row] over one part of K; d[row, columns of p] = 0 where there is no A_p.

    `x` is [rows, K], `t` float32, `d` [rows, columns of all], `words32` the records as int32. An item is 16 ranks by
    one of SPLITS parts of K, or 8 by two; an entry has half of the parts of K, or all. Those without rank share the
    columns that they set to zero. The projections of an entry are neighbours, so that `x` comes from memory once. Each
    item's record is on its way while the one before is computed.
    """
    ITEMS: tl.constexpr = SPLITS // 2
    num_items = tl.load(words + 1) * (P * ITEMS)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    a_offset, word, start, end = shrink_item(
        first, max_entries * (P * ITEMS), records, words32, max_entries, site0, site1, site2, P, ITEMS
    )
    n = tl.arange(0, LINE)
    for item in range(first, num_items, step):
        next_a, next_word, next_start, next_end = shrink_item(
            item + step, num_items, records, words32, max_entries, site0, site1, site2, P, ITEMS
        )
        rank = rank_of(word)
        part = part_of(word)
        is_narrow = form_of(word) == 0
        nth = item // P % ITEMS
        group = tl.where(is_narrow, n // HALF, 0)
        split = tl.where(is_narrow, 2 * nth, (part & 1) * ITEMS + nth) + group
        row = n - group * HALF
        r = tl.where(is_narrow, 0, (part >> 1) * LINE) + row
        is_row = start + row < end
        is_rank = r < rank
        k0 = split * split_k
        length = tl.minimum(k0 + split_k, K) - k0
        x_rows = x + (start + row).to(tl.int64) * K + k0
        a_rows = memory + a_offset * UNIT + r * K + k0
        sums = tl.zeros([LINE, LINE], dtype=tl.float32)
        for k in tl.range(0, tl.where((part >> 1) * LINE < rank, split_k, 0), BK, num_stages=STAGES):
            ks = k + tl.arange(0, BK)
            inside = ks[None, :] < length[:, None]
            x_tile = tl.load(x_rows[:, None] + ks[None, :], mask=is_row[:, None] & inside, other=0.0)
            a_tile = tl.load(a_rows[:, None] + ks[None, :], mask=is_rank[:, None] & inside, other=0.0)
            sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision=PRECISION)
        out = t + split * T_SPLIT + (start + row).to(tl.int64) * T_STRIDE + (item % P) * R_MAX
        kept = (is_row[:, None] & is_rank[None, :]) & (group[:, None] == group[None, :])
        tl.store(out[:, None] + r[None, :], sums, mask=kept)
        if rank == 0:
            p, num_out = item % P, out0 + out1 + out2
            width = pick(p, out0, out1, out2)
            share = tl.cdiv(width, (ITEMS << form_of(word)) * ZEROS) * ZEROS
            first_column = (part * ITEMS + nth) * share
            out_rows = d + start.to(tl.int64) * num_out + pick(p, 0, out0, out0 + out1)
            for _ in range(end - start):
                _store_zeros(out_rows, first_column, tl.minimum(first_column + share, width))
                out_rows += num_out
        a_offset, word, start, end = next_a, next_word, next_start, next_end


@triton.jit
def _line_own(t, rank, form, T_SPLIT, SPLITS: tl.constexpr):
    """What the values of a line are weighed with, in parts [LINE, SPLITS]; twice t[0:8] where it holds two columns.

    The parts of a value are neighbours: the other way round, the compiler spreads B over the threads as it does these.
    """
    value = tl.arange(0, LINE)
    r = tl.where(form == 0, value % HALF, value)
    split = tl.arange(0, SPLITS)
    return tl.load(t + split[None, :] * T_SPLIT + r[:, None], mask=(r < rank)[:, None], other=0.0)


@triton.jit
def _store_row(d, y, width):
    column = tl.arange(0, y.numel)
    tl.store(d + column, y.to(d.dtype.element_ty), mask=column < width)


@triton.jit
def _expand_lines(
    d, t, values, parts, rank, form, scale, num_rows, num_out, width, T_SPLIT, T_STRIDE, SPLITS: tl.constexpr
):
    """d[row, columns] for the rows of a tile with rank 16 or less; a row's t is on its way while the one before is
    computed. `parts` is that of the first.
    """
    for row in range(num_rows):
        t += T_STRIDE
        next_parts = _line_own(t, tl.where(row + 1 < num_rows, rank, 0), form, T_SPLIT, SPLITS)
        weighed = values.to(tl.float32) * tl.sum(parts, axis=1)[None, :]
        if form == 0:
            pairs = tl.reshape(weighed, (2 * values.shape[0], HALF))
            _store_row(d, tl.sum(pairs, axis=1) * scale, width)
        else:
            _store_row(d, tl.sum(weighed, axis=1) * scale, width)
        d += num_out
        parts = next_parts


@triton.jit
def _expand_many(
    d, t, values, rank, scale, num_rows, num_out, width, T_SPLIT, T_STRIDE,
    SPLITS: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for many rows: by the matrix units, all parts of t on the way at once."""
    row = tl.arange(0, LINE)
    own = sum_parts(t, row, num_rows, rank, 0, scale, T_SPLIT, T_STRIDE, SPLITS, LINE)
    sums = tl.dot(own.to(values.dtype), tl.trans(values), input_precision=PRECISION)
    column = tl.arange(0, LINES)
    kept = (row < num_rows)[:, None] & (column < width)[None, :]
    tl.store(d + row[:, None] * num_out + column[None, :], sums.to(d.dtype.element_ty), mask=kept)


@triton.jit
def _expand_wide(
    d, t, values, rank, scale, num_rows, num_out, width, T_SPLIT, T_STRIDE,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for ranks above 16, RANKS at most, of which a column takes several lines."""
    lines = tl.reshape(values, (COLUMNS, RANKS))
    row = tl.arange(0, LINE)
    own = sum_parts(t, row, num_rows, rank, 0, scale, T_SPLIT, T_STRIDE, SPLITS, RANKS)
    sums = tl.dot(own.to(lines.dtype), tl.trans(lines), input_precision=PRECISION)
    column = tl.arange(0, COLUMNS)
    kept = (row < num_rows)[:, None] & (column < width)[None, :]
    tl.store(d + row[:, None] * num_out + column[None, :], sums.to(d.dtype.element_ty), mask=kept)


@triton.jit
def _place(item, p, word, num_blocks, blocks0, blocks01, out0, out1, out2, LINES: tl.constexpr):
    """(first column of an item, columns of the projection from there on)."""
    before = pick(p, 0, blocks0, blocks01)
    whole = pick(p, blocks0, blocks01, num_blocks) - before
    column = (part_of(word) * whole + item % num_blocks - before) * ((2 * LINES) >> form_of(word))
    return column, pick(p, out0, out1, out2) - column


@triton.jit
def _fetch(
    item, p, b_offset, word, start, t, memory, num_blocks, blocks0, blocks01, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX,
    SPLITS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """(first column, width, lines of B [LINES, LINE], parts of the first row's t) of an item with rank 16 or less."""
    rank, form = rank_of(word), form_of(word)
    column, width = _place(item, p, word, num_blocks, blocks0, blocks01, out0, out1, out2, LINES)
    stride = row_of_b(rank)
    apart = tl.where(form == 0, 2 * stride, stride)
    line, value = tl.arange(0, LINES)[:, None], tl.arange(0, LINE)[None, :]
    is_line = line < tl.where(form == 0, width // 2, width)
    b = memory + b_offset * UNIT + column.to(tl.int64) * stride
    values = tl.load(b + line * apart + value, mask=is_line & (value < apart), other=0.0)
    parts = _line_own(t + start.to(tl.int64) * T_STRIDE + p * R_MAX, rank, form, T_SPLIT, SPLITS)
    return column, width, values, parts


@triton.jit
def _fetch_wide(item, p, b_offset, word, memory, num_blocks, blocks0, blocks01, out0, out1, out2, LINES: tl.constexpr):
    """(first column, width, lines of B [LINES, LINE]) of an item with a larger rank, a column's lines together."""
    column, width = _place(item, p, word, num_blocks, blocks0, blocks01, out0, out1, out2, LINES)
    stride, shift = row_of_b(rank_of(word)), tl.maximum(form_of(word) - 1, 0)
    line = tl.arange(0, LINES)
    r = ((line & ((1 << shift) - 1)) * LINE)[:, None] + tl.arange(0, LINE)[None, :]
    b = memory + b_offset * UNIT + column.to(tl.int64) * stride
    is_line = ((line >> shift) < width)[:, None] & (r < stride)
    return column, width, tl.load(b + (line >> shift)[:, None] * stride + r, mask=is_line, other=0.0)


@triton.jit
def _only(word, start, end, is_wide: tl.constexpr):
    """(word, end) of an item of this kind; another one is as if it had no rank and no rows."""
    kept = (form_of(word) >= 2) == is_wide
    return tl.where(kept, word, 0), tl.where(kept, end, start)


@triton.jit(do_not_specialize=["max_entries", "site0", "site1", "site2"])
def decode_expand_kernel(
    d, t, memory, records, words32, floats, counts, max_entries, site0, site1, site2, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX,
    SPLITS: tl.constexpr, LINES: tl.constexpr, IS_MIXED: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d[row, columns of p] = scale B_p t[row], for rows and projections with LoRA of rank 16 or less.

    `d` is [rows, columns of all], each an even number. Rows of B lie so many elements apart as the rank in steps of
    eight; what fills a row up is zero. An item is LINES lines of 16 values, which for ranks that are powers of two lie
    one after the other. While it is computed, the B and t of the next one are on their way, and the record of the one
    after.

    Left out are the adapters whose largest rank is above 16; `IS_MIXED` says that there may be any.
    """
    blocks0, blocks01, num_blocks = blocks_of(out0, out1, out2, 2 * LINES)
    num_out = out0 + out1 + out2
    num_items = most_of(counts, 0, site0, site1, site2, out1, out2) * num_blocks
    first = tl.program_id(0)
    step = tl.num_programs(0)
    # These come while `num_items` does; what lies behind the last entry is anything.
    most_items = max_entries * num_blocks
    p, b_offset, word, scale, start, end = expand_item(
        first, most_items, records, words32, floats, max_entries, num_blocks, blocks0, blocks01, site0, site1, site2
    )
    next_p, next_b, next_word, next_scale, next_start, next_end = expand_item(
        first + step, most_items, records, words32, floats, max_entries, num_blocks, blocks0, blocks01,
        site0, site1, site2,
    )  # fmt: skip
    word = tl.where(first < num_items, word, 0)
    next_word = tl.where(first + step < num_items, next_word, 0)
    if IS_MIXED:
        word, end = _only(word, start, end, False)
        next_word, next_end = _only(next_word, next_start, next_end, False)
    column, width, values, parts = _fetch(
        first, p, b_offset, word, start, t, memory, num_blocks, blocks0, blocks01, out0, out1, out2, T_SPLIT, T_STRIDE,
        R_MAX, SPLITS, LINES,
    )  # fmt: skip
    for item in range(first, num_items, step):
        after_p, after_b, after_word, after_scale, after_start, after_end = expand_item(
            item + 2 * step, num_items, records, words32, floats, max_entries, num_blocks, blocks0, blocks01,
            site0, site1, site2,
        )  # fmt: skip
        next_column, next_width, next_values, next_parts = _fetch(
            item + step, next_p, next_b, next_word, next_start, t, memory, num_blocks, blocks0, blocks01,
            out0, out1, out2, T_SPLIT, T_STRIDE, R_MAX, SPLITS, LINES,
        )  # fmt: skip
        rank, form = rank_of(word), form_of(word)
        own_t = t + start.to(tl.int64) * T_STRIDE + p * R_MAX
        out = d + start.to(tl.int64) * num_out + pick(p, 0, out0, out0 + out1) + column
        num_rows = end - start
        if (num_rows <= FEW) | (form == 0):
            _expand_lines(
                out, own_t, values, parts, rank, form, scale, num_rows, num_out, width, T_SPLIT, T_STRIDE, SPLITS
            )
        else:
            _expand_many(
                out, own_t, values, rank, scale, num_rows, num_out, width, T_SPLIT, T_STRIDE, SPLITS, LINES, PRECISION
            )
        if IS_MIXED:
            after_word, after_end = _only(after_word, after_start, after_end, False)
        p, word, scale, start, end = next_p, next_word, next_scale, next_start, next_end
        column, width, values, parts = next_column, next_width, next_values, next_parts
        next_p, next_b, next_word, next_scale, next_start, next_end = (
            after_p, after_b, after_word, after_scale, after_start, after_end,
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_entries", "site0", "site1", "site2"])
def decode_expand_wide_kernel(
    d, t, memory, records, words32, floats, counts, max_entries, site0, site1, site2, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX,
    SPLITS: tl.constexpr, LINES: tl.constexpr, MOST_FORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The like for the adapters whose largest rank is above 16."""
    tl.static_assert(MOST_FORM <= 5, "a column is 16 lines at most")
    blocks0, blocks01, num_blocks = blocks_of(out0, out1, out2, 2 * LINES)
    num_out = out0 + out1 + out2
    first = (FAR - most_of(counts, 2, site0, site1, site2, out1, out2)) * num_blocks + tl.program_id(0)
    end_item = most_of(counts, 1, site0, site1, site2, out1, out2) * num_blocks
    step = tl.num_programs(0)
    if first < end_item:
        p, b_offset, word, scale, start, end = expand_item(
            first, end_item, records, words32, floats, max_entries, num_blocks, blocks0, blocks01, site0, site1, site2
        )
        next_p, next_b, next_word, next_scale, next_start, next_end = expand_item(
            first + step, end_item, records, words32, floats, max_entries, num_blocks, blocks0, blocks01,
            site0, site1, site2,
        )  # fmt: skip
        word, end = _only(word, start, end, True)
        column, width, values = _fetch_wide(
            first, p, b_offset, word, memory, num_blocks, blocks0, blocks01, out0, out1, out2, LINES
        )
        for item in range(first, end_item, step):
            after_p, after_b, after_word, after_scale, after_start, after_end = expand_item(
                item + 2 * step, end_item, records, words32, floats, max_entries, num_blocks, blocks0, blocks01,
                site0, site1, site2,
            )  # fmt: skip
            next_word, next_end = _only(next_word, next_start, next_end, True)
            next_column, next_width, next_values = _fetch_wide(
                item + step, next_p, next_b, next_word, memory, num_blocks, blocks0, blocks01, out0, out1, out2, LINES
            )
            own_t = t + start.to(tl.int64) * T_STRIDE + p * R_MAX
            out = d + start.to(tl.int64) * num_out + pick(p, 0, out0, out0 + out1) + column
            for wide in tl.static_range(2, MOST_FORM + 1):
                if form_of(word) == wide:
                    _expand_wide(
                        out, own_t, values, rank_of(word), scale, end - start, num_out, width, T_SPLIT, T_STRIDE,
                        SPLITS, (2 * LINES) >> wide, LINE << (wide - 1), PRECISION,
                    )  # fmt: skip
            p, word, scale, start, end = next_p, next_word, next_scale, next_start, next_end
            column, width, values = next_column, next_width, next_values
            next_p, next_b, next_word, next_scale, next_start, next_end = (
                after_p, after_b, after_word, after_scale, after_start, after_end,
            )  # fmt: skip
