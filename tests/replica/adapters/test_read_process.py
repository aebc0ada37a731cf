"""Reading by other processes: the same images and errors as in this one, whatever becomes of the processes."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from registry.types import AdapterManifest
from replica.adapters import cache, read_process, read_worker
from replica.adapters.files import BytesChanged
from replica.adapters.host_memory import HostMemory
from replica.adapters.image_reader import ImageReader
from replica.adapters.node_store import NodeStore
from replica.adapters.read_process import ReadProcesses, _requests
from replica.adapters.weights import AdapterImage, plan_layout
from replica.config import MIB, AdapterCacheConfig
from replica.errors import AdapterUnavailable
from tests.replica.adapters.made import (
    ALL_SEVEN,
    BY_PATH,
    QV,
    SITES,
    DictSource,
    Made,
    describe,
    dirty_block,
    layout_of,
    make_adapter,
)
from tests.replica.adapters.test_cache import bench

DTYPE = torch.bfloat16
ROOT = Path(__file__).parents[3]
PROCESSES = 3
KINDS = [(8, "F32", ALL_SEVEN), (3, "BF16", QV), (16, "F16", ALL_SEVEN), (64, "BF16", ALL_SEVEN), (5, "F32", QV[:1])]
ADAPTERS = [
    make_adapter(seed, rank=rank, dtype=dtype, targets=targets) for seed, (rank, dtype, targets) in enumerate(KINDS)
]


def put(made: Made, folder: Path) -> Path:
    path = folder / made.digest
    path.write_bytes(made.blob)
    return path


def read(reader: ReadProcesses, made: Made, path: Path) -> AdapterImage:
    """Into memory in which another image has lain."""
    layout = layout_of(made, DTYPE)
    block = reader._memory.allocate(layout.num_bytes)
    assert block is not None
    block.data.fill_(0xFF)
    return reader.read(path, made.manifest, layout, block)


def read_here(made: Made, path: Path) -> AdapterImage:
    layout = layout_of(made, DTYPE)
    return ImageReader().read(path, made.manifest, layout, dirty_block(layout.num_bytes))


def same(image: AdapterImage, other: AdapterImage) -> bool:
    return torch.equal(image.data.view(torch.int16), other.data.view(torch.int16))


def hub_of(reader: ReadProcesses) -> read_process._Hub:
    assert reader._hub is not None
    return reader._hub


def hub_pid(reader: ReadProcesses) -> int:
    return hub_of(reader)._process.pid


def pids(reader: ReadProcesses) -> list[int]:
    """Of the processes that read, which are the hub's children."""
    return children(hub_pid(reader))


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(numbers: Sequence[int], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while any(is_there(pid) for pid in numbers):
        assert time.monotonic() < end_s, numbers
        time.sleep(0.02)


def kill(*numbers: int) -> None:
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(numbers)


@contextmanager
def reading(num_processes: int, num_lanes: int = 1) -> Iterator[ReadProcesses]:
    memory = HostMemory(4 * MIB, pin=False, share=True)
    try:
        reader = ReadProcesses(SITES, DTYPE, num_processes, memory, num_lanes)
        try:
            yield reader
        finally:
            reader.close()
    finally:
        memory.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[ReadProcesses]:
    """The smallest adapters are shared."""
    with patch.object(read_process, "_LEAST_SHARE_BYTES", 1), reading(PROCESSES, num_lanes=4) as made:
        yield made


@pytest.fixture(scope="module")
def single() -> Iterator[ReadProcesses]:
    with reading(1) as made:
        yield made


@contextmanager
def waiting(reader: ReadProcesses, made: Made, pipe: Path) -> Iterator[Future[AdapterImage]]:
    """A read that waits, as nobody opens the other end of its pipe."""
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(read, reader, made, pipe)
        time.sleep(0.3)
        try:
            assert not found.done()
            yield found
        finally:
            if pipe.is_fifo():
                os.close(os.open(pipe, os.O_RDWR))


@given(
    rank=st.integers(1, 80),
    targets=st.lists(st.sampled_from(ALL_SEVEN), unique=True),
    most=st.integers(1, 9),
    least=st.integers(1, 1 << 15),
)
def test_shares_are_small_adapters_that_follow_each_other(rank: int, targets: list[str], most: int, least: int) -> None:
    modules = tuple(
        module for module in make_adapter(0, rank=rank).manifest.modules if module.path.split(".", 3)[3] in targets
    )
    manifest = ADAPTERS[0].manifest.model_copy(update={"modules": modules})
    layout = plan_layout(manifest, BY_PATH, DTYPE)
    with patch.object(read_process, "_LEAST_SHARE_BYTES", least):
        shares = _requests(Path("file"), manifest, layout, 1000, most)
    assert len(shares) <= most
    assert [share.start for share in shares] == [1000, *(share.end for share in shares)][: len(shares)]
    assert sum(share.end - share.start for share in shares) == layout.num_bytes
    assert all(share.end - share.start >= least for share in shares[:-1])
    placed = []
    for share in shares:
        inside = plan_layout(AdapterManifest.model_validate_json(share.manifest), BY_PATH, DTYPE)
        assert inside.num_bytes == share.end - share.start
        placed += [(place.path, share.start + place.b_offset * DTYPE.itemsize) for place in inside.places]
    assert placed == [(place.path, 1000 + place.b_offset * DTYPE.itemsize) for place in layout.places]


def test_images_are_those_that_this_process_reads(reader: ReadProcesses, tmp_path: Path) -> None:
    first = ADAPTERS[0]
    assert len(_requests(tmp_path, first.manifest, layout_of(first, DTYPE), 0, PROCESSES)) == PROCESSES
    for made in ADAPTERS:
        path = put(made, tmp_path)
        reader.expect(path)
        image = read(reader, made, path)
        assert same(image, read_here(made, path)), made
        assert image.digest == made.digest
        assert 0 < image.convert_share < 1


def test_an_image_without_room_is_read_here(reader: ReadProcesses, tmp_path: Path) -> None:
    made = ADAPTERS[2]
    path = put(made, tmp_path)
    with patch.object(hub_of(reader), "ask", side_effect=AssertionError):
        image = reader.read(path, made.manifest, layout_of(made, DTYPE))
    assert same(image, read_here(made, path))


def test_many_readers_get_their_own_images(reader: ReadProcesses, tmp_path: Path) -> None:
    paths = {made.digest: put(made, tmp_path) for made in ADAPTERS}
    alone = {made.digest: read_here(made, paths[made.digest]) for made in ADAPTERS}
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
            read_here(adapter, file)
        with pytest.raises(AdapterUnavailable) as there:
            read(reader, adapter, file)
        assert type(there.value) is type(here.value)
        assert there.value.message == here.value.message
    with pytest.raises(BytesChanged):
        read(reader, made, path)
    reader.expect(tmp_path / "missing")
    path = put(ADAPTERS[1], tmp_path)
    assert same(read(reader, ADAPTERS[1], path), read_here(ADAPTERS[1], path))


def test_that_bytes_changed_is_told_whatever_else_is_wrong(reader: ReadProcesses, tmp_path: Path) -> None:
    """The file is thrown away then; values that are not finite would be so in the next copy as well."""
    healthy = make_adapter(3)
    first = next(iter(healthy.tensors.values()))
    first.fill_(float("nan"))
    made = describe(healthy.tensors, SITES, 8, 3)
    path = put(made, tmp_path)
    path.write_bytes(made.blob[:-1] + bytes([made.blob[-1] ^ 1]))
    with pytest.raises(BytesChanged):
        read_here(made, path)
    with pytest.raises(BytesChanged):
        read(reader, made, path)


def test_an_adapter_without_modules_needs_its_file_too(reader: ReadProcesses, tmp_path: Path) -> None:
    made = ADAPTERS[0]
    path = put(made, tmp_path)
    empty = made.manifest.model_copy(update={"modules": ()})
    layout, block = plan_layout(empty, BY_PATH, DTYPE), reader._memory.allocate(128)
    assert block is not None
    assert reader.read(path, empty, layout, block).num_bytes == 0
    with pytest.raises(AdapterUnavailable, match="cannot be read"):
        reader.read(tmp_path / "missing", empty, layout, block)


def test_a_read_that_fails_ends_when_nobody_writes_to_its_memory_any_more(
    reader: ReadProcesses, tmp_path: Path
) -> None:
    made = ADAPTERS[3]
    missing = tmp_path / "missing"
    read(reader, made, put(made, tmp_path))
    stopped = pids(reader)[-1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            failing = threads.submit(read, reader, made, missing)
            time.sleep(0.3)
            assert not failing.done()
            os.kill(stopped, signal.SIGCONT)
            with pytest.raises(AdapterUnavailable, match="cannot be read"):
                failing.result(timeout=30)
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_killed_processes_are_replaced_and_reads_come_through(reader: ReadProcesses, tmp_path: Path) -> None:
    made = ADAPTERS[3]
    path, before, hub = put(made, tmp_path), pids(reader), hub_pid(reader)
    alone = read_here(made, path)
    for victims in (before[:1], before[1:], [hub]):
        kill(*victims)
        reader.expect(path)
        with ThreadPoolExecutor(4) as threads:
            images = list(threads.map(lambda _: read(reader, made, path), range(8)))
        assert all(same(image, alone) for image in images)
        assert (hub_pid(reader) == hub) == (hub not in victims)
        assert len(pids(reader)) == PROCESSES
    assert len(set(before) | set(pids(reader))) == 2 * PROCESSES


def test_another_hub_starts_when_no_worker_of_a_killed_one_is_left(single: ReadProcesses, tmp_path: Path) -> None:
    """One that is slow to end would write to memory that is another image's by then."""
    made, hub = ADAPTERS[3], hub_pid(single)
    path = put(made, tmp_path)
    lifeline = Path(f"/proc/{hub}/cmdline").read_text().split("\0")[4]
    held = os.open(f"/proc/{hub}/fd/{lifeline}", os.O_WRONLY)  # as a worker does
    try:
        kill(hub)
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(read, single, made, path)
            time.sleep(0.5)
            assert hub_pid(single) == hub
            assert not found.done()
            os.close(held)
            held = -1
            assert same(found.result(timeout=30), read_here(made, path))
    finally:
        if held >= 0:
            os.close(held)


@pytest.mark.parametrize("is_hub", [False, True])
def test_a_process_killed_amid_a_read_is_replaced(single: ReadProcesses, tmp_path: Path, is_hub: bool) -> None:
    made, pipe = ADAPTERS[0], tmp_path / "pipe"
    alone = read_here(made, put(made, tmp_path))
    with waiting(single, made, pipe) as found:
        before = pids(single)
        pipe.unlink()
        put(made, tmp_path).rename(pipe)
        os.kill(hub_pid(single) if is_hub else before[0], signal.SIGKILL)
        assert same(found.result(timeout=30), alone)
    assert pids(single) != before
    wait_until_gone(before, limit_s=2)


def test_processes_that_cannot_start_are_an_error_of_the_adapter(
    monkeypatch: pytest.MonkeyPatch, single: ReadProcesses, tmp_path: Path
) -> None:
    path = put(ADAPTERS[0], tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(read_process, "_HUB", "raise SystemExit(3)")
        with pytest.raises(AdapterUnavailable, match="no process that reads adapters can be started"), reading(2):
            pass
        kill(hub_pid(single))
        for _ in range(3):
            with pytest.raises(AdapterUnavailable, match="no process that reads adapters can be started"):
                read(single, ADAPTERS[0], path)
        single.expect(path)
    assert same(read(single, ADAPTERS[0], path), read_here(ADAPTERS[0], path))


ENDS_AT_BIRTH = """
from replica.adapters import read_hub
def work(*_):
    raise MemoryError("no room for a thread")
read_hub.work = work
read_hub.main()
"""


def test_workers_that_end_before_they_work_are_an_error_of_the_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_process, "_HUB", ENDS_AT_BIRTH)
    with pytest.raises(AdapterUnavailable, match="no process that reads adapters can be started"), reading(2):
        pass
    assert capfd.readouterr().err.count("no room for a thread") == 1


STARTS_AND_ENDS = """
import sys
from multiprocessing.connection import Connection
lane = Connection(int(sys.argv[4]))
lane.recv()
lane.send(None)
lane.recv()
"""


def test_a_read_over_which_hubs_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, single: ReadProcesses, tmp_path: Path
) -> None:
    path = put(ADAPTERS[0], tmp_path)
    with monkeypatch.context() as ending:
        ending.setattr(read_process, "_HUB", STARTS_AND_ENDS)
        kill(hub_pid(single))
        with pytest.raises(AdapterUnavailable, match="ended, and so did the next ones"):
            read(single, ADAPTERS[0], path)
    assert same(read(single, ADAPTERS[0], path), read_here(ADAPTERS[0], path))


def test_a_read_over_which_two_processes_end_is_an_error(tmp_path: Path) -> None:
    """As when an adapter takes more memory than there is; others are read meanwhile."""
    made, other = make_adapter(7, sites=SITES[:1]), ADAPTERS[0]
    path = put(other, tmp_path)
    alone = read_here(other, path)
    with reading(2, num_lanes=2) as reader:
        with waiting(reader, made, tmp_path / "pipe") as found:
            first, second = pids(reader)
            kill(first)
            assert same(read(reader, other, path), alone)
            (third,) = set(pids(reader)) - {second}
            assert not found.done()
            kill(third)
            assert same(read(reader, other, path), alone)
            with pytest.raises(AdapterUnavailable, match="the process that reads it ended, and so did the next one"):
                found.result(timeout=30)
        assert second in pids(reader)
        assert same(read(reader, made, put(made, tmp_path)), read_here(made, tmp_path / made.digest))


START = """
import sys, threading, time, torch
from pathlib import Path
from replica.adapters.host_memory import HostMemory
from replica.adapters.read_process import ReadProcesses
from tests.replica.adapters.made import SITES, layout_of, make_adapter
memory = HostMemory(1 << 20, pin=False, share=True)
reader = ReadProcesses(SITES, torch.bfloat16, 2, memory)
def read(path, made):
    layout = layout_of(made, torch.bfloat16)
    return reader.read(path, made.manifest, layout, memory.allocate(layout.num_bytes))
hub = reader._hub._process.pid
print(hub, *Path(f"/proc/{hub}/task/{hub}/children").read_text().split(), flush=True)
"""


@contextmanager
def started(code: str, **options: Any) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A Python process that reads by processes, and theirs."""
    process = subprocess.Popen([sys.executable, "-c", START + code], stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        numbers = [int(number) for number in process.stdout.readline().split()]
        assert len(numbers) == 3
        yield process, numbers
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_processes_end_with_the_one_that_started_them_also_amid_a_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        f"threading.Thread(target=read, args=(Path({str(pipe)!r}), make_adapter(0)), daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    with started(code) as (parent, numbers):
        time.sleep(0.5)  # until one of them waits for the pipe's other end
        assert all(is_there(pid) for pid in numbers)
        parent.kill()
        wait_until_gone(numbers)


LIKE_PID_1 = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
signal.signal(signal.SIGCHLD, signal.SIG_{})
path, made = Path({!r}), make_adapter(0)
def children(pid):
    return Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split()
os.kill(int(children(reader._hub._process.pid)[0]), signal.SIGKILL)
read(path, made)
os.kill(reader._hub._process.pid, signal.SIGKILL)
read(path, made)
print(len(children(os.getpid())), flush=True)
reader.close()
print(len(children(os.getpid())), flush=True)
"""


@pytest.mark.parametrize("disposition", ["DFL", "IGN"])
def test_the_first_process_of_a_container_keeps_no_zombies(tmp_path: Path, disposition: str) -> None:
    """Whether or not whoever started it left the signal ignored that tells of a child's end."""
    path = put(make_adapter(0), tmp_path)
    with started(LIKE_PID_1.format(disposition, str(path))) as (parent, _):
        assert parent.stdout is not None
        assert parent.stdout.read().split() == ["1", "0"]


def test_standard_streams_may_be_closed(tmp_path: Path) -> None:
    path = put(make_adapter(0), tmp_path)
    code = f"print(read(Path({str(path)!r}), make_adapter(0)).num_bytes > 0)\nreader.close()\n"
    with started(code, preexec_fn=lambda: os.close(0)) as (parent, _):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("queue", "torch", "replica"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('another module')\n")
    code = (
        "path, made = Path('file'), make_adapter(0)\n"
        "path.write_bytes(made.blob)\n"
        "print(read(path, made).digest == made.digest)\n"
        "reader.close()\n"
    )
    folders = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": folders, "PYTHONSAFEPATH": "1"}
    with started(code, cwd=tmp_path, env=environment) as (parent, _):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"
        assert parent.wait(timeout=30) == 0


def test_closing_ends_a_read_and_is_idempotent(tmp_path: Path) -> None:
    made, pipe = ADAPTERS[0], tmp_path / "pipe"
    with reading(1) as reader:
        before = [*pids(reader), hub_pid(reader)]
        with waiting(reader, made, pipe) as found:
            reader.close()
            with pytest.raises(AdapterUnavailable, match="closed"):
                found.result(timeout=30)
        with (tmp_path / "other").open("wb") as other:
            reader.close()
            other.write(b"still open")
        with pytest.raises(AdapterUnavailable, match="closed"):
            read(reader, made, put(made, tmp_path))
        reader.expect(pipe)
        wait_until_gone(before, limit_s=2)


def test_an_interrupted_read_leaves_nobody_that_answers_or_writes(single: ReadProcesses, tmp_path: Path) -> None:
    first, second = ADAPTERS[0], ADAPTERS[1]
    path, other = put(first, tmp_path), put(second, tmp_path)
    read(single, first, path)
    before, lane = pids(single), hub_of(single)._lanes[0]
    with patch.object(lane, "recv", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        read(single, first, path)
    wait_until_gone(before, limit_s=2)
    assert same(read(single, second, other), read_here(second, other))
    assert pids(single) != before


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, start = os.listdir("/proc/self/fd"), read_process._start
    started: list[int] = []

    def start_one(given: Sequence[int]) -> "subprocess.Popen[bytes]":
        process = start(given)
        started.append(process.pid)
        return process

    with monkeypatch.context() as failing:
        failing.setattr(read_process, "_start", start_one)
        failing.setattr(read_process, "_HUB", "import sys; sys.stdin.read(); raise SystemExit(3)")
        with pytest.raises(AdapterUnavailable, match="can be started"), reading(2):
            pass
        assert not is_there(*started)
    with monkeypatch.context() as failing:
        failing.setattr(subprocess, "Popen", _no_more_processes)
        with pytest.raises(AdapterUnavailable, match="no more processes"), reading(2):
            pass
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def _no_more_processes(*_: Any, **__: Any) -> None:
    raise BlockingIOError("no more processes")


def test_paths_that_cannot_be_read_do_not_stop_reading_ahead(single: ReadProcesses, tmp_path: Path) -> None:
    """Nor do more of them than a process takes in at once."""
    made = ADAPTERS[2]
    path = put(made, tmp_path)
    with pytest.raises(NotADirectoryError):
        ImageReader(2).expect(path / "below")
    read(single, made, path)
    before = pids(single)
    for name in (*(["below"] * 2000), "nul\0", "\ud800"):
        single.expect(path / name)
    assert same(read(single, made, path), read_here(made, path))
    assert pids(single) == before


def test_each_process_reads_ahead_its_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    asked: list[list[int]] = [[], [], []]
    monkeypatch.setattr(read_worker, "_AHEAD_BYTES", 150)
    for index, starts in enumerate(asked):
        monkeypatch.setattr(read_worker, "read_ahead", lambda _, start, size, starts=starts: starts.append(start))
        read_worker.ReadWorker(SITES, DTYPE, mmap.mmap(-1, mmap.PAGESIZE), index, 3).expect(path)
    assert asked == [[0, 450, 900], [150, 600], [300, 750]]


@pytest.mark.parametrize(
    ("asked", "num_threads", "on_gpu", "expected"),
    [
        (None, None, True, (8, True)),
        (None, None, False, (1, False)),
        (False, None, True, (8, False)),
        (True, None, False, (1, True)),
        (None, 3, True, (3, True)),
    ],
)
def test_processes_read_on_a_gpu_unless_the_configuration_says_otherwise(
    asked: bool | None, num_threads: int | None, on_gpu: bool, expected: tuple[int, bool]
) -> None:
    config = AdapterCacheConfig(read_in_processes=asked, num_read_threads=num_threads)
    assert cache._readers(config, on_gpu) == expected


def test_a_cache_that_fails_to_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[ReadProcesses] = []

    def read_by(*arguments: Any) -> ReadProcesses:
        made.append(ReadProcesses(*arguments))
        return made[0]

    def start(_: int) -> cache.Workers:
        raise RuntimeError("no more threads")

    gc.collect()
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(cache, "ReadProcesses", read_by)
    monkeypatch.setattr(cache.Workers, "start", start)
    config = AdapterCacheConfig(read_in_processes=True, num_read_threads=1, host_bytes=MIB, arena_bytes=MIB)
    store = NodeStore(tmp_path, DictSource(), MIB)
    with pytest.raises(RuntimeError, match="no more threads"):
        cache.AdapterCache.build(config, store, SITES, torch.device("cpu"), DTYPE)
    assert [hub_of(each).is_killed for each in made] == [True]
    made.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_cache_reads_by_processes_and_ends_them(tmp_path: Path) -> None:
    made = [make_adapter(seed) for seed in range(3)]
    with bench(tmp_path, max_slots=2, read_in_processes=True, num_read_threads=2) as fleet:
        reader = fleet.cache._reader
        assert isinstance(reader, ReadProcesses)
        started = [*pids(reader), hub_pid(reader)]
        assert len(started) == 3
        fleet.stage(*made)
        fleet.use(*made, *made)
        assert fleet.cache.stats().loads["node"] == len(made)
    wait_until_gone(started, limit_s=2)
