"""Writes the whole corpus: `python -m tests.corpus.make FOLDER` leaves one folder an adapter, and what is expected.

Every row of the treatment of PEFT's format and the known faults of other servers, made by PEFT on tiny random bases.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.corpus import bad_configs, bad_files, good
from tests.corpus.kit import Case, Kit
from tests.tiny_models import make_model


def every_case() -> Iterator[Case]:
    yield from good.cases()
    yield from bad_configs.cases()
    yield from bad_files.cases()


def main(folder: Path) -> None:
    cases = list(every_case())
    kits = {arch: Kit(make_model(folder / "bases" / f"tiny-{arch}", arch)) for arch in {c.architecture for c in cases}}
    expected = {}
    for case in cases:
        case.build(kits[case.architecture], folder / case.name)
        expected[case.name] = {"base": case.architecture, "code": case.code, "warnings": sorted(case.warnings)}
    (folder / "expected.json").write_text(json.dumps(expected, indent=2))
    print(f"{len(cases)} adapters in {folder}, {sum(case.code is not None for case in cases)} of them to be refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
