"""Reading by other processes: the same images and errors as in this one, whatever becomes of the processes."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from replica.adapters import cache, read_process
from replica.adapters.files import BytesChanged
from replica.adapters.image_reader import ImageReader
from replica.adapters.read_process import ReadProcesses
from replica.adapters.weights import AdapterImage
from replica.config import AdapterCacheConfig
from replica.errors import AdapterUnavailable
from tests.replica.adapters.made import SITES, Made, dirty_block, layout_of, make_adapter
from tests.replica.adapters.test_cache import bench

DTYPE = torch.bfloat16
ROOT = Path(__file__).parents[3]
LARGEST_BYTES = 1 << 20
ADAPTERS = [
    make_adapter(seed, rank=rank, dtype=dtype)
    for seed, (rank, dtype) in enumerate([(8, "F32"), (3, "BF16"), (16, "F16"), (64, "BF16"), (5, "F32")])
]


def put(made: Made, folder: Path) -> Path:
    path = folder / made.digest
    path.write_bytes(made.blob)
    return path


def read(reader: ReadProcesses | ImageReader, made: Made, path: Path) -> AdapterImage:
    layout = layout_of(made, DTYPE)
    return reader.read(path, made.manifest, layout, dirty_block(layout.num_bytes))


def same(image: AdapterImage, other: AdapterImage) -> bool:
    return torch.equal(image.data.view(torch.int16), other.data.view(torch.int16))


def pids(reader: ReadProcesses) -> list[int]:
    return [lane._process.pid for lane in reader._lanes]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(numbers: list[int], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while any(is_there(pid) for pid in numbers):
        assert time.monotonic() < end_s, numbers
        time.sleep(0.02)


def taken(reader: ReadProcesses) -> int:
    """Bytes that the kernel has given to the areas, at most."""
    return max(os.fstat(lane._file.fileno()).st_blocks * 512 for lane in reader._lanes)


@pytest.fixture(scope="module")
def reader() -> Iterator[ReadProcesses]:
    made = ReadProcesses(SITES, DTYPE, num_threads=2, largest_image_bytes=LARGEST_BYTES)
    yield made
    made.close()


def test_images_are_those_that_this_process_reads(reader: ReadProcesses, tmp_path: Path) -> None:
    for made in ADAPTERS:
        path = put(made, tmp_path)
        reader.expect(path)
        image = read(reader, made, path)
        assert same(image, read(ImageReader(), made, path)), made
        assert image.digest == made.digest
        assert 0 < image.convert_share < 1


def test_more_readers_than_processes_get_their_own_images(reader: ReadProcesses, tmp_path: Path) -> None:
    paths = {made.digest: put(made, tmp_path) for made in ADAPTERS}
    alone = {made.digest: read(ImageReader(), made, paths[made.digest]) for made in ADAPTERS}
    with ThreadPoolExecutor(6) as threads:
        images = list(threads.map(lambda made: read(reader, made, paths[made.digest]), ADAPTERS * 12))
    assert all(same(image, alone[image.digest]) for image in images)


def test_errors_are_those_of_this_process(reader: ReadProcesses, tmp_path: Path) -> None:
    made, infinite = ADAPTERS[0], make_adapter(9, fill=float("inf"))
    path = put(made, tmp_path)
    path.write_bytes(made.blob[:-1] + bytes([made.blob[-1] ^ 1]))
    cases = [(made, path), (made, tmp_path / "missing"), (infinite, put(infinite, tmp_path))]
    for adapter, file in cases:
        with pytest.raises(AdapterUnavailable) as here:
            read(ImageReader(), adapter, file)
        with pytest.raises(AdapterUnavailable) as there:
            read(reader, adapter, file)
        assert type(there.value) is type(here.value)
        assert there.value.message == here.value.message
    with pytest.raises(BytesChanged):
        read(reader, made, path)
    reader.expect(tmp_path / "missing")
    path = put(ADAPTERS[1], tmp_path)
    assert same(read(reader, ADAPTERS[1], path), read(ImageReader(), ADAPTERS[1], path))


def test_a_killed_process_is_replaced_and_the_read_comes_through(reader: ReadProcesses, tmp_path: Path) -> None:
    made = ADAPTERS[3]
    path, before = put(made, tmp_path), pids(reader)
    alone = read(ImageReader(), made, path)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(before)
    reader.expect(path)
    with ThreadPoolExecutor(4) as threads:
        images = list(threads.map(lambda _: read(reader, made, path), range(8)))
    assert all(same(image, alone) for image in images)
    assert set(pids(reader)) != set(before)


def test_a_process_killed_amid_a_read_is_replaced(reader: ReadProcesses, tmp_path: Path) -> None:
    """A pipe instead of a file: the process waits for its first bytes until it is killed."""
    made = ADAPTERS[0]
    path = tmp_path / "pipe"
    os.mkfifo(path)
    alone = read(ImageReader(), made, put(made, tmp_path))
    with ThreadPoolExecutor(1) as threads:
        before = pids(reader)
        waiting = threads.submit(read, reader, made, path)
        while reader._idle.qsize() == len(reader._lanes):
            time.sleep(0.01)
        (busy,) = (lane for lane in reader._lanes if lane not in list(reader._idle.queue))
        path.unlink()
        put(made, tmp_path).rename(path)
        os.kill(busy._process.pid, signal.SIGKILL)
        assert same(waiting.result(timeout=30), alone)
    assert sum(pid not in before for pid in pids(reader)) == 1


def test_processes_that_cannot_start_are_an_error_of_the_adapter(
    monkeypatch: pytest.MonkeyPatch, reader: ReadProcesses, tmp_path: Path
) -> None:
    path, before = put(ADAPTERS[0], tmp_path), pids(reader)
    with monkeypatch.context() as broken:
        broken.setattr(read_process, "_WORKER", "raise SystemExit(3)")
        with pytest.raises(AdapterUnavailable, match="no process that reads adapters can be started"):
            ReadProcesses(SITES, DTYPE, num_threads=1, largest_image_bytes=LARGEST_BYTES)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(before)
        for _ in range(3):
            with pytest.raises(AdapterUnavailable, match="ended, and so did the next one"):
                read(reader, ADAPTERS[0], path)
        reader.expect(path)
    assert same(read(reader, ADAPTERS[0], path), read(ImageReader(), ADAPTERS[0], path))


GREETS_AND_ENDS = """
import sys
from multiprocessing.connection import Connection
requests = Connection(int(sys.argv[1]))
requests.recv()
requests.send(None)
requests.recv()
"""


def test_a_read_over_which_processes_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, reader: ReadProcesses, tmp_path: Path
) -> None:
    """As when an adapter takes more memory than there is."""
    path, before = put(ADAPTERS[0], tmp_path), pids(reader)
    with monkeypatch.context() as ending:
        ending.setattr(read_process, "_WORKER", GREETS_AND_ENDS)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(before)
        with pytest.raises(AdapterUnavailable, match="ended, and so did the next one"):
            read(reader, ADAPTERS[0], path)
    assert same(read(reader, ADAPTERS[0], path), read(ImageReader(), ADAPTERS[0], path))


def test_a_large_image_leaves_no_more_memory_than_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read_process, "NUM_PROCESSES", 1)
    monkeypatch.setattr(read_process, "_KEPT_BYTES", kept := 1 << 16)
    reader = ReadProcesses(SITES, DTYPE, num_threads=1, largest_image_bytes=LARGEST_BYTES)
    small, large = ADAPTERS[1], ADAPTERS[3]
    sizes = [layout_of(made, DTYPE).num_bytes for made in (small, large)]
    assert sizes[0] < kept < sizes[1], sizes
    try:
        for made, most in ((small, sizes[0] + 4096), (large, kept), (small, kept)):
            read(reader, made, put(made, tmp_path))
            assert 0 < taken(reader) <= most
        changed = put(large, tmp_path)
        changed.write_bytes(large.blob[:-1] + bytes([large.blob[-1] ^ 1]))
        with pytest.raises(BytesChanged):
            read(reader, large, changed)
        assert taken(reader) <= kept
    finally:
        reader.close()


START = """
import sys, threading, time, torch
from pathlib import Path
from replica.adapters import read_process
from tests.replica.adapters.made import SITES, layout_of, make_adapter
read_process.NUM_PROCESSES = 1
reader = read_process.ReadProcesses(SITES, torch.bfloat16, 1, 1 << 20)
print(*(lane._process.pid for lane in reader._lanes), flush=True)
"""


@contextmanager
def started(code: str, **options: Any) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A Python process that reads by processes, and theirs."""
    process = subprocess.Popen([sys.executable, "-c", START + code], stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        numbers = [int(number) for number in process.stdout.readline().split()]
        assert len(numbers) == 1
        yield process, numbers
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_processes_end_with_the_one_that_started_them_also_amid_a_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        f"made, pipe = make_adapter(0), Path({str(pipe)!r})\n"
        "arguments = pipe, made.manifest, layout_of(made, torch.bfloat16)\n"
        "threading.Thread(target=reader.read, args=arguments, daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    with started(code) as (parent, numbers):
        time.sleep(0.5)  # until one of them waits for the pipe's other end
        assert all(is_there(pid) for pid in numbers)
        parent.kill()
        wait_until_gone(numbers)


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("queue", "torch", "replica"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('another module')\n")
    code = (
        "path, made = Path('file'), make_adapter(0)\n"
        "path.write_bytes(made.blob)\n"
        "print(reader.read(path, made.manifest, layout_of(made, torch.bfloat16)).digest == made.digest)\n"
        "reader.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    with started(code, cwd=tmp_path, env=environment) as (parent, _):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"
        assert parent.wait(timeout=30) == 0


def test_closing_ends_a_read_and_is_idempotent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read_process, "NUM_PROCESSES", 1)
    reader = ReadProcesses(SITES, DTYPE, num_threads=1, largest_image_bytes=LARGEST_BYTES)
    made, pipe = ADAPTERS[0], tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(read, reader, made, pipe)
        while not reader._idle.empty():
            time.sleep(0.01)
        time.sleep(0.2)
        reader.close()
        with pytest.raises(AdapterUnavailable, match="closed"):
            waiting.result(timeout=30)
    with (tmp_path / "other").open("wb") as other:
        reader.close()
        other.write(b"still open")
    with pytest.raises(AdapterUnavailable, match="closed"):
        read(reader, made, put(made, tmp_path))
    reader.expect(pipe)
    assert not any(is_there(pid) for pid in pids(reader))


def test_an_interrupted_read_leaves_no_answer_to_the_next(reader: ReadProcesses, tmp_path: Path) -> None:
    first, second = ADAPTERS[0], ADAPTERS[1]
    path, other = put(first, tmp_path), put(second, tmp_path)
    request = read_process.ReadRequest(path, first.manifest.model_dump_json())
    lane = reader._idle.queue[-1]
    assert lane.read(request).error is None
    before = lane._process.pid
    with patch.object(lane._requests, "recv", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        lane.read(request)
    assert lane._process.pid != before
    alone = read(ImageReader(), second, other)
    assert all(same(read(reader, second, other), alone) for _ in reader._lanes)


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    start, running, before = subprocess.Popen, list[Any](), os.listdir("/proc/self/fd")

    def start_one(*args: Any, **options: Any) -> Any:
        if running:
            raise BlockingIOError("no more processes")
        running.append(start(*args, **options))
        return running[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(AdapterUnavailable, match="no more processes"):
        ReadProcesses(SITES, DTYPE, num_threads=1, largest_image_bytes=LARGEST_BYTES)
    assert not is_there(running[0].pid)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_paths_that_cannot_be_read_do_not_stop_reading_ahead(reader: ReadProcesses, tmp_path: Path) -> None:
    """Nor do more of them than a process takes in at once."""
    made = ADAPTERS[2]
    path = put(made, tmp_path)
    with pytest.raises(NotADirectoryError):
        ImageReader(2).expect(path / "below")
    lane = reader._idle.queue[-1]
    assert same(read(reader, made, path), read(ImageReader(), made, path))
    for _ in range(2000):
        reader.expect(path / "below")
        lane.expect(path / "below")
    end_s = time.monotonic() + 20
    while not lane.expect(path / "below"):
        assert time.monotonic() < end_s, "nobody takes in what was sent"
    assert same(read(reader, made, path), read(ImageReader(), made, path))


@pytest.mark.parametrize(
    ("asked", "on_gpu", "expected"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_processes_read_on_a_gpu_unless_the_configuration_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, on_gpu: bool, expected: bool
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(cache, "ReadProcesses", lambda sites, dtype, threads, size: made.append((threads, size)))
    found = cache._reader(AdapterCacheConfig(read_in_processes=asked), SITES, DTYPE, 1 << 20, on_gpu)
    assert made == ([(8 if on_gpu else 1, 1 << 20)] if expected else [])
    assert isinstance(found, ImageReader) != expected


def test_a_cache_reads_by_processes_and_ends_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read_process, "NUM_PROCESSES", 1)
    made = [make_adapter(seed) for seed in range(3)]
    with bench(tmp_path, max_slots=2, read_in_processes=True) as fleet:
        reader = fleet.cache._reader
        assert isinstance(reader, ReadProcesses)
        started = pids(reader)
        fleet.stage(*made)
        fleet.use(*made, *made)
        assert fleet.cache.stats().loads["node"] == len(made)
    assert not any(is_there(pid) for pid in started)
