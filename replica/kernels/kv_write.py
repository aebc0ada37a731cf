"""Writing a step's keys and values into the paged cache: one launch a layer in Triton, and its plain torch form."""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl


def write_kv_reference(
    keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """What `write_kv` does, in plain torch."""
    real = slots >= 0
    keys[slots[real]] = k[real]
    values[slots[real]] = v[real]


@triton.jit
def _write_rows(
    keys, values, k, v, slots, k_row, k_head, v_row, v_head,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        i = tl.arange(0, BLOCK)
        key = tl.load(k + row * k_row + (i // K_DIM) * k_head + i % K_DIM, mask=i < K_SIZE)
        value = tl.load(v + row * v_row + (i // V_DIM) * v_head + i % V_DIM, mask=i < V_SIZE)
        tl.store(keys + slot * K_SIZE + i, key, mask=i < K_SIZE)
        tl.store(values + slot * V_SIZE + i, value, mask=i < V_SIZE)


def write_kv(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Put row i of `k` and `v` into slot `slots[i]` of a layer's cache; rows whose slot is negative are left out.

    `keys` and `values` are [num_slots, kv_heads, dim], contiguous; `k` and `v` [rows, kv_heads, dim] with neighbouring
    elements of a head (their rows may lie apart); `slots` int64 [rows]. Two rows must not name one slot.
    """
    assert keys.is_contiguous() and values.is_contiguous(), "a cache lies in one piece"  # noqa: PT018
    assert k.stride(2) == 1 and v.stride(2) == 1, "a head's elements are neighbours"  # noqa: PT018
    if not k.shape[0]:
        return
    k_size, v_size = k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]
    block = triton.next_power_of_2(max(k_size, v_size))
    _write_rows[(k.shape[0],)](
        keys, values, k, v, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        K_DIM=k.shape[2], V_DIM=v.shape[2], K_SIZE=k_size, V_SIZE=v_size, BLOCK=block, num_warps=4,
    )  # fmt: skip
