"""The kernel that writes keys and values against its plain form: interpreted on a CPU, compiled on a device."""

import os

import pytest
import torch

IS_ON_DEVICE = torch.cuda.is_available()
pytest.importorskip("triton")
if not IS_ON_DEVICE and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from replica.kernels.kv_write import write_kv, write_kv_reference  # noqa: E402

DEVICE = torch.device("cuda" if IS_ON_DEVICE else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if IS_ON_DEVICE else torch.float16]


def rows_of(num_rows: int, num_heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_heads, dim, generator=generator).to(dtype).to(DEVICE)


def check(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, num_slots: int = 40) -> None:
    ours = [torch.full((num_slots, *rows.shape[1:]), 7.0, dtype=rows.dtype, device=DEVICE) for rows in (k, v)]
    theirs = [cache.clone() for cache in ours]
    write_kv(*ours, k, v, slots)
    write_kv_reference(*theirs, k, v, slots)
    for written, expected in zip(ours, theirs, strict=True):
        assert torch.equal(written, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "k_dim", "v_dim"), [(8, 128, 128), (3, 64, 64), (2, 24, 16), (1, 5, 5)])
def test_rows_come_to_their_slots(num_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    slots = torch.tensor([31, 0, 7, 39, 16], device=DEVICE)
    check(rows_of(5, num_heads, k_dim, dtype, 1), rows_of(5, num_heads, v_dim, dtype, 2), slots)


def test_rows_with_negative_slots_are_left_out() -> None:
    slots = torch.tensor([-1, 3, -1], device=DEVICE)
    check(rows_of(3, 2, 16, torch.float32, 1), rows_of(3, 2, 16, torch.float32, 2), slots)


def test_rows_may_be_views_of_a_merged_output() -> None:
    merged = rows_of(4, 12, 16, torch.float32, 3)
    check(merged[:, 8:10], merged[:, 10:], torch.tensor([9, 2, 33, 4], device=DEVICE))


def test_no_rows_write_nothing() -> None:
    empty = rows_of(0, 2, 16, torch.float32, 1)
    check(empty, empty, torch.zeros(0, dtype=torch.int64, device=DEVICE))


@pytest.mark.skipif(not IS_ON_DEVICE, reason="takes 4 GiB")
def test_slots_beyond_two_to_the_31_elements_are_reached() -> None:
    k = rows_of(1, 8, 128, torch.bfloat16, 1)
    num_slots = 2**31 // 1024 + 8
    keys, values = (torch.zeros(num_slots, 8, 128, dtype=k.dtype, device=DEVICE) for _ in range(2))
    write_kv(keys, values, k, k, torch.tensor([num_slots - 1], device=DEVICE))
    assert torch.equal(keys[-1:], k)
    assert int(keys[:-1].count_nonzero()) == 0
