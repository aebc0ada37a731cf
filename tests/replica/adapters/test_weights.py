"""From file to image: every value at its place, nothing that is not finite, nothing that does not fit the base."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from replica.adapters.files import BytesChanged
from replica.adapters.image_reader import ImageReader
from replica.adapters.tensor_file import bytes_of, is_finite, read_ahead
from replica.adapters.weights import AdapterImage, plan_layout, row_of_b, view_pairs
from replica.errors import AdapterUnavailable
from tests.replica.adapters.made import (
    ALL_SEVEN,
    BY_PATH,
    DTYPES,
    QV,
    SITES,
    Made,
    assert_holds,
    describe,
    dirty_block,
    layout_of,
    make_adapter,
)


def read(made: Made, folder: Path, dtype: torch.dtype) -> AdapterImage:
    path = folder / "file.safetensors"
    path.write_bytes(made.blob)
    return ImageReader().read(path, made.manifest, plan_layout(made.manifest, BY_PATH, dtype))


@pytest.mark.parametrize("file_dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("targets", [ALL_SEVEN, QV])
def test_image_holds_the_true_tensors(
    tmp_path: Path, file_dtype: str, dtype: torch.dtype, targets: tuple[str, ...]
) -> None:
    made = make_adapter(1, rank=3, targets=targets, dtype=file_dtype)
    image = read(made, tmp_path, dtype)
    assert_holds(view_pairs(image.data, 0, image.layout), made, dtype)


@pytest.mark.parametrize("rank", [1, 3, 8, 64])
def test_layout_is_aligned_and_without_overlap(rank: int) -> None:
    layout = plan_layout(make_adapter(1, rank=rank).manifest, BY_PATH, torch.bfloat16)
    stretches = []
    for place in layout.places:
        stretches.append((place.a_offset, place.rank * place.in_features))
        stretches.append((place.b_offset, row_of_b(place.rank) * place.out_features))
    end = 0
    for offset, size in sorted(stretches):
        assert offset * 2 % 128 == 0
        assert offset >= end
        end = offset + size
    assert end <= layout.num_elements < end + 64
    assert [place.site for place in layout.places] == [site.index for site in SITES]


def test_file_of_mixed_dtypes_is_read_right(tmp_path: Path) -> None:
    mixed = {key: value.to(DTYPES[name]) for (key, value), name in zip(make_adapter(1).tensors.items(), cycle(DTYPES))}
    made = describe(mixed, SITES, rank=8, seed=0)
    for dtype in DTYPES.values():
        image = read(made, tmp_path, dtype)
        assert_holds(view_pairs(image.data, 0, image.layout), made, dtype)


def test_header_of_odd_length_is_read_right(tmp_path: Path) -> None:
    made = make_adapter(1)
    length = int.from_bytes(made.blob[:8], "little")
    header = made.blob[8 : 8 + length].rstrip() + b" "
    header += b" " * (1 - len(header) % 2)
    blob = len(header).to_bytes(8, "little") + header + made.blob[8 + length :]
    assert len(header) % 2 == 1
    image = read(replace(made, blob=blob), tmp_path, torch.bfloat16)
    assert_holds(view_pairs(image.data, 0, image.layout), made, torch.bfloat16)


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_finite_check_agrees_with_torch(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    good = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 4], dtype=dtype)
    assert is_finite(bytes_of(good).data, dtype)
    for value in (float("inf"), -float("inf"), float("nan")):
        bad = torch.cat((good, torch.tensor([value], dtype=dtype)))
        assert not is_finite(bytes_of(bad).data, dtype)


def test_reading_ahead_is_a_hint_alone(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"x" * 1001)
    read_ahead(path, 0, 4)
    read_ahead(path, 990, 100)
    READER.expect(path)
    path.unlink()
    read_ahead(path, 0, 1)
    READER.expect(path)
    assert not path.exists()


def test_large_tensors_are_read_in_pieces(tmp_path: Path) -> None:
    key = f"base_model.model.{SITES[0].path}"
    wide = {
        f"{key}.lora_A.weight": torch.arange(3000 * 32, dtype=torch.float32).reshape(3000, 32),
        f"{key}.lora_B.weight": torch.arange(32 * 3000, dtype=torch.float32).reshape(32, 3000),
    }
    made = describe(wide, SITES, rank=3000, seed=0)
    image = read(made, tmp_path, torch.float32)
    assert_holds(view_pairs(image.data, 0, image.layout), made)


@pytest.mark.parametrize(("fill", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, fill: float, dtype: torch.dtype) -> None:
    with pytest.raises(AdapterUnavailable, match=r"down_proj.lora_B.weight has values that are not finite"):
        read(make_adapter(1, fill=fill), tmp_path, dtype)


def test_overflow_of_the_cast_is_refused(tmp_path: Path) -> None:
    made = make_adapter(1, fill=7e4)
    read(made, tmp_path, torch.bfloat16)
    with pytest.raises(AdapterUnavailable, match=r"not finite in torch.float16"):
        read(made, tmp_path, torch.float16)


def test_module_that_the_base_lacks_is_refused() -> None:
    sites = {path: site for path, site in BY_PATH.items() if "layers.1" not in path}
    with pytest.raises(AdapterUnavailable, match=r"no projection model.layers.1"):
        plan_layout(make_adapter(1).manifest, sites, torch.float32)


def test_shape_that_the_base_lacks_is_refused() -> None:
    path = SITES[1].path
    wrong = {**BY_PATH, path: BY_PATH[SITES[0].path]}
    with pytest.raises(AdapterUnavailable, match=path):
        plan_layout(make_adapter(1).manifest, wrong, torch.float32)


def test_file_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    manifest = make_adapter(1, rank=8).manifest
    layout = plan_layout(manifest, BY_PATH, torch.float32)
    good = make_adapter(1, rank=8).blob
    blobs = {
        "rank": make_adapter(1, rank=4).blob,
        "dtype": make_adapter(1, rank=8, dtype="F16").blob,
        "few": make_adapter(1, targets=QV).blob,
        "empty": b"",
        "no data": good[: 8 + int.from_bytes(good[:8], "little")],
        "end": good[:-1],
        "header": good[:8] + b"[" + good[9:],
    }
    for name, blob in blobs.items():
        path = tmp_path / name
        path.write_bytes(blob)
        with pytest.raises(AdapterUnavailable, match=manifest.digest):
            ImageReader().read(path, manifest, layout)
    with pytest.raises(AdapterUnavailable, match=manifest.digest):
        ImageReader().read(tmp_path / "missing", manifest, layout)


READER = ImageReader(num_threads=3)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    READER.close()


@pytest.mark.parametrize("file_dtype", ["F32", "BF16"])
@pytest.mark.parametrize("rank", [3, 8])
def test_many_threads_read_the_same_image_into_used_memory(
    tmp_path: Path, file_dtype: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.adapters.image_reader._PIECE_BYTES", 1024)
    made = make_adapter(1, rank=rank, dtype=file_dtype)
    path, layout = tmp_path / "file", layout_of(made, torch.bfloat16)
    path.write_bytes(made.blob)
    alone = ImageReader().read(path, made.manifest, layout)
    image = READER.read(path, made.manifest, layout, dirty_block(layout.num_bytes))
    assert_holds(view_pairs(image.data, 0, layout), made, torch.bfloat16)
    for place in layout.places:
        end = place.b_offset + row_of_b(place.rank) * place.out_features
        rows = image.data[place.b_offset : end].view(place.out_features, row_of_b(place.rank))
        assert not rows[:, place.rank :].any(), "what fills up a row keeps what was there before"
        assert not image.data[end : -(-end // 64) * 64].any(), "padding keeps what was there before"
    assert torch.equal(image.data.isfinite(), torch.ones(layout.num_elements, dtype=torch.bool))
    assert_holds(view_pairs(alone.data, 0, layout), made, torch.bfloat16)


@pytest.mark.parametrize("reader", [ImageReader(), READER], ids=["one", "many"])
def test_one_changed_byte_anywhere_is_found(tmp_path: Path, reader: ImageReader) -> None:
    made = make_adapter(1)
    path, layout = tmp_path / "file", layout_of(made, torch.float32)
    start = 8 + int.from_bytes(made.blob[:8], "little")
    for place in (start, (start + len(made.blob)) // 2, len(made.blob) - 1):
        path.write_bytes(made.blob[:place] + bytes([made.blob[place] ^ 1]) + made.blob[place + 1 :])
        with pytest.raises(BytesChanged, match="other bytes than were uploaded"):
            reader.read(path, made.manifest, layout)


def test_no_thread_writes_after_a_read_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory belongs to the next image as soon as the read has raised."""
    monkeypatch.setattr("replica.adapters.image_reader._PIECE_BYTES", 1024)
    made = make_adapter(1)
    path, layout = tmp_path / "file", layout_of(made, torch.float32)
    path.write_bytes(made.blob[:-1] + bytes([made.blob[-1] ^ 1]))
    for _ in range(20):
        block = dirty_block(layout.num_bytes)
        with pytest.raises(BytesChanged):
            READER.read(path, made.manifest, layout, block)
        block.data.fill_(0x11)
        time.sleep(0.001)
        assert bool((block.data == 0x11).all())


@pytest.mark.parametrize("file_dtype", ["F32", "BF16"])
def test_block_diagonal_factors_get_their_zeros(tmp_path: Path, file_dtype: str) -> None:
    q, down = f"base_model.model.{SITES[0].path}", f"base_model.model.{SITES[6].path}"
    random = torch.Generator().manual_seed(0)
    shapes = {f"{q}.lora_A.weight": (8, 16), f"{q}.lora_B.weight": (32, 8)}
    shapes |= {f"{down}.lora_A.weight": (8, 48), f"{down}.lora_B.weight": (32, 4)}
    stored = {key: torch.randn(shape, generator=random).to(DTYPES[file_dtype]) for key, shape in shapes.items()}
    made = describe(stored, SITES, rank=8, seed=0)
    modules = tuple(
        module.model_copy(update={"a_blocks": 2} if module.path == SITES[0].path else {"b_blocks": 2})
        for module in made.manifest.modules
    )
    manifest = made.manifest.model_copy(update={"modules": modules})
    dense = {
        **stored,
        f"{q}.lora_A.weight": torch.block_diag(*stored[f"{q}.lora_A.weight"].float().chunk(2)),
        f"{down}.lora_B.weight": torch.block_diag(*stored[f"{down}.lora_B.weight"].float().chunk(2)),
    }
    path = tmp_path / "file"
    path.write_bytes(made.blob)
    layout = plan_layout(manifest, BY_PATH, torch.bfloat16)
    image = READER.read(path, manifest, layout, dirty_block(layout.num_bytes))
    assert_holds(view_pairs(image.data, 0, layout), replace(made, tensors=dense), torch.bfloat16)


def test_large_file_is_read_in_runs_longer_than_one_call_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.adapters.tensor_file._MAX_TARGETS", 3)
    whole = os.preadv
    monkeypatch.setattr("os.preadv", lambda fd, targets, start: whole(fd, [targets[0][:1000]], start))
    made = make_adapter(1)
    path, layout = tmp_path / "file", layout_of(made, torch.float32)
    path.write_bytes(made.blob)
    assert_holds(view_pairs(ImageReader().read(path, made.manifest, layout).data, 0, layout), made)
