"""What does host memory cost that processes share: to take it, to copy from it, and the processes themselves?

    python -m benchmarks.host_memory [--gib 1] [--processes 8] [--pin]

The same host memory with pages of its own and shared, each twice and in turn, after one that is not counted: seconds to
take it (with `--pin`, on a CUDA machine, to page-lock it as well, and the median milliseconds of copies of 84 MB to the
device). Then the processes that read into it for a Llama-3.1-8B shape: seconds until they are there, and what they take
of the machine's memory, each page that several map counted once (PSS).
"""

import argparse
import statistics
import time
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.provenance import save
from benchmarks.read_stalls import llama
from replica.adapters.host_memory import HostMemory, _touch
from replica.adapters.read_process import ReadProcesses

COPY_BYTES, NUM_COPIES = 84 << 20, 20


def taking(num_bytes: int, share: bool, pin: bool) -> dict[str, object]:
    started_s = time.perf_counter()
    with closing(HostMemory(num_bytes, pin, share)) as memory:
        block = memory.allocate(num_bytes)
        assert block is not None
        if not pin:
            _touch(block.data)
        took_s = time.perf_counter() - started_s
        copy_ms = round(median_copy_ms(block.data), 3) if pin else None
    return {"memory": "shared" if share else "of its own", "take_s": round(took_s, 3), "copy_ms": copy_ms}


def median_copy_ms(source: torch.Tensor) -> float:
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for start in range(0, NUM_COPIES * COPY_BYTES, COPY_BYTES):
        first = start % (source.numel() - COPY_BYTES)
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(source[first : first + COPY_BYTES], non_blocking=True)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(times)


def processes(num_bytes: int, count: int) -> dict[str, object]:
    base = llama()
    with closing(HostMemory(num_bytes, pin=False, share=True)) as memory:
        started_s = time.perf_counter()
        with closing(ReadProcesses(base.sites, base.dtype, count, memory)) as reader:
            took_s = time.perf_counter() - started_s
            assert reader._hub is not None
            hub = reader._hub._process.pid
            workers = Path(f"/proc/{hub}/task/{hub}/children").read_text().split()
            mib = [pss_mib(pid) for pid in (str(hub), *workers)]
    return {"workers": len(workers), "start_s": round(took_s, 2), "hub_mib": mib[0], "all_mib": round(sum(mib))}


def pss_mib(pid: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (pss,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return round(int(pss) / 1024, 1)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--pin", action="store_true")
    options = parser.parse_args()
    num_bytes = options.gib << 30
    if options.pin:
        torch.zeros(1, device="cuda")
    taking(num_bytes, share=False, pin=options.pin)  # the machine itself may get its memory only now
    rows = [taking(num_bytes, share, options.pin) for share in (False, True) * 2]
    rows.append(processes(num_bytes, options.processes))
    for row in rows:
        print(row)
    save("host_memory", __doc__, vars(options), rows)


if __name__ == "__main__":
    main()
