"""The corpus through the real path: upload, manifest, blob, image, reference kernel; against PEFT's own logits."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from registry.config import RegistryConfig
from registry.errors import InvalidAdapter, LimitExceeded
from registry.service import Registry
from registry.types import PushResult
from replica.adapters.image_reader import ImageReader
from replica.adapters.weights import plan_layout, view_pairs
from replica.config import ModelConfig
from replica.model.base_model import BaseModel
from tests.corpus.kit import Case, Kit
from tests.corpus.make import every_case
from tests.replica.model.packed import PackedRunner, Pairs, prompts
from tests.tiny_models import make_model

CASES = list(every_case())
GOOD = [case for case in CASES if case.code is None]
BAD = [case for case in CASES if case.code is not None]
TOLERANCE = 1e-4
TOKENS = prompts([17], seed=3)[0]
COMMIT = "a" * 40


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Bench:
    """One base with its registry: what an upload meets."""

    def __init__(self, folder: Path, architecture: str) -> None:
        base = make_model(folder / f"tiny-{architecture}", architecture)
        self.kit = Kit(base)
        model = ModelConfig.model_validate({"base": str(base), "device": "cpu", "revision": COMMIT})
        self.base = BaseModel.load(model)
        self.runner = PackedRunner(self.base)
        config = RegistryConfig(data_dir=folder / "data", max_rank=64, max_unpacked_bytes=5_000_000)
        self.registry = Registry.open(config)
        self.registry.blobs.put_bytes(self.base.tokenizer_json)
        self.registry.publish_base(self.base.spec, actor="test")

    def push(self, folder: Path, name: str) -> PushResult:
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
        return self.registry.push(name, files, owner="test", activate=False)

    def pairs(self, pushed: PushResult) -> Pairs:
        """As a replica stages it: from the manifest and the blob to an image in the base's dtype."""
        manifest = self.registry.manifest(pushed.version.digest)
        blob = self.registry.config.data_dir / "blobs" / manifest.blob_sha256[:2] / manifest.blob_sha256
        layout = plan_layout(manifest, {site.path: site for site in self.base.sites}, self.base.dtype)
        image = ImageReader().read(blob, manifest, layout)
        return view_pairs(image.data, 0, layout)

    def logits(self, pairs: Pairs) -> torch.Tensor:
        stream = self.runner.start(TOKENS, pairs=pairs)
        rows = self.runner.step([(stream, len(TOKENS))], all_rows=True)
        self.runner.free.extend(stream.blocks)
        return rows


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    folder = tmp_path_factory.mktemp("corpus")
    made = {arch: Bench(folder / arch, arch) for arch in sorted({case.architecture for case in CASES})}
    yield made
    for bench in made.values():
        bench.registry.close()


def home_of(folder: Path, case: Case, kit: Kit, scratch: Path) -> Path:
    """The folder that PEFT loads: where the adapter is, or was before it was packed."""
    found = sorted(folder.rglob("adapter_config.json"))
    if found:
        return found[0].parent
    (archive,) = folder.iterdir()
    kind = {"PK": "zip", "\x1f\x8b": "gztar"}.get(archive.read_bytes()[:2].decode("latin-1"), "tar")
    shutil.unpack_archive(archive, scratch, kind, **({} if kind == "zip" else {"filter": "data"}))
    return next(scratch.rglob("adapter_config.json")).parent


@pytest.mark.parametrize("case", GOOD, ids=str)
def test_good_adapter_is_served_with_pefts_logits(case: Case, benches: dict[str, Bench], tmp_path: Path) -> None:
    bench = benches[case.architecture]
    case.build(bench.kit, tmp_path / "upload")
    pushed = bench.push(tmp_path / "upload", case.name)
    assert {warning.code for warning in pushed.warnings} == case.warnings
    oracle = bench.kit.logits(home_of(tmp_path / "upload", case, bench.kit, tmp_path / "out"), TOKENS)
    ours = bench.logits(bench.pairs(pushed))
    assert (ours - oracle).abs().max() <= TOLERANCE
    base = bench.logits({})
    changes = case.warnings.isdisjoint({"alpha_zero", "changes_nothing"})
    assert ((ours - base).abs().max() > 0.01) == changes, "the corpus shows nothing"


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_adapter_is_refused_with_its_code(case: Case, benches: dict[str, Bench], tmp_path: Path) -> None:
    bench = benches[case.architecture]
    case.build(bench.kit, tmp_path)
    with pytest.raises((InvalidAdapter, LimitExceeded)) as caught:
        bench.push(tmp_path, "refused")
    error = caught.value
    codes = {fault.code for fault in error.faults} if isinstance(error, InvalidAdapter) else {error.code}
    assert case.code in codes
    assert codes <= {case.code, *case.also}
    assert bench.registry.adapters() == tuple(a for a in bench.registry.adapters() if a.name != "refused")


def test_corpus_is_as_large_as_it_says() -> None:
    assert len(CASES) >= 120
    assert len({case.name for case in CASES}) == len(CASES)
