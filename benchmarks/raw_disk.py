"""How fast a file's bytes come with nothing but reads: what the file system alone allows, beside a load of ours."""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 2 << 20
NUM_THREADS = 8


def read_ms(path: Path, *, direct: bool = False) -> float:
    """Milliseconds to read a file by pieces in several threads, past the page cache with `direct`.

    Raises OSError where the file system has no direct reads.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    size = os.fstat(descriptor).st_size
    with ThreadPoolExecutor(NUM_THREADS) as threads, mmap.mmap(-1, size + PIECE_BYTES) as memory:
        memory.write(bytes(size))  # the pages are there before the clock runs
        whole = memoryview(memory)
        try:
            started_s = time.perf_counter()
            read = threads.map(
                lambda start: os.preadv(descriptor, [whole[start : start + PIECE_BYTES]], start),
                range(0, size, PIECE_BYTES),
            )
            assert sum(read) == size, "a short read"
            return 1e3 * (time.perf_counter() - started_s)
        finally:
            whole.release()
            os.close(descriptor)


def table(paths: Iterable[Path], evict: Callable[[Path], None]) -> list[dict[str, object]]:
    """Medians over the files, each read in every way."""
    ways: dict[str, Callable[[Path], float]] = {
        "page cache warm": lambda path: read_ms(path),
        "evicted": lambda path: _after(evict, path, False),
        "evicted, direct": lambda path: _after(evict, path, True),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    num_bytes = 0
    for path in paths:
        num_bytes = path.stat().st_size
        for name, way in ways.items():
            try:
                read_ms(path)
                found[name].append(way(path))
            except OSError as error:
                print(f"{name}: {error}")
    return [
        {"file": name, "read_ms": round(statistics.median(times), 2), "bytes": num_bytes, "threads": NUM_THREADS}
        for name, times in found.items()
        if times
    ]


def _after(evict: Callable[[Path], None], path: Path, direct: bool) -> float:
    evict(path)
    return read_ms(path, direct=direct)
