"""Instructions of this process in user space, counted by valgrind: the same work gives nearly the same count each time.

`python -m benchmarks.something` runs itself again under valgrind with `under_valgrind`, and there counts with
`Instructions`. Needs valgrind, its header and a C compiler (Debian: `valgrind`, `gcc`).
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = "LORAFLEET_COUNT_IN"
"""Names, for the process under valgrind, the folder of its counts."""

SOURCE = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def under_valgrind(module: str, arguments: Sequence[str], folder: Path) -> None:
    """Run `python -m module arguments` there. Raises CalledProcessError."""
    (folder / "count.c").write_text(SOURCE)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", folder / "count.so", folder / "count.c"], check=True)
    tool = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
    alone = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", FOLDER: str(folder)}
    subprocess.run([*tool, sys.executable, "-m", module, *arguments], check=True, env={**os.environ, **alone})


class Instructions:
    """Counts those of all threads between `begin` and `end`."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[FOLDER])
        self._library = ctypes.CDLL(str(self._folder / "count.so"))
        self._num_counts = 0

    def begin(self) -> None:
        self._library.begin()

    def end(self) -> float:
        self._library.end()
        self._num_counts += 1
        path = self._folder / f"out.{self._num_counts}"
        found = re.search(r"^totals: (\d+)$", path.read_text(), re.MULTILINE)
        assert found is not None, path
        path.unlink()
        return int(found[1])
