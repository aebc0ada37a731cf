"""What ties an adapter to its base, its tokenizer and the fleet's template; and what makes two uploads one version."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from registry.adapter_format import read_adapter
from registry.config import RegistryConfig
from registry.errors import InvalidAdapter
from registry.service import Registry
from registry.tokenizer_files import StoredBaseTokens
from registry.types import AdapterManifest, BaseSpec, TemplateRules
from tests.registry.uploads import (
    Tensors,
    bf16,
    f32,
    make_base,
    make_config,
    make_tensors,
    open_registry,
    paths_of,
    plain_upload,
    write_upload,
)

COMMIT, OTHER = "a" * 40, "b" * 40
BASE = make_base().model_copy(update={"revision": COMMIT})
PATHS = paths_of(BASE, "q_proj", "v_proj")


def read(
    folder: Path,
    config: Any = None,
    claim: Any = None,
    *,
    base: BaseSpec = BASE,
    tensors: Tensors | None = None,
    **more: Any,
) -> AdapterManifest:
    files = {} if claim is None else {"lorafleet_base.json": json.dumps(claim).encode()}
    upload = write_upload(folder, config or make_config(), tensors or make_tensors(BASE, PATHS), **files)
    return read_adapter(upload, base, RegistryConfig(**more))


def codes(folder: Path, *args: Any, **more: Any) -> set[str]:
    with pytest.raises(InvalidAdapter) as caught:
        read(folder, *args, **more)
    assert all(fault.hint for fault in caught.value.faults)
    return {fault.code for fault in caught.value.faults}


def verified_by(manifest: AdapterManifest) -> tuple[str, bool]:
    assert manifest.base is not None
    return manifest.base.verified_by, manifest.base_verified


def test_manifest_records_the_base(tmp_path: Path) -> None:
    base = read(tmp_path).base
    assert base is not None
    assert base.model_dump() == {
        "base_id": "acme/tiny",
        "revision": COMMIT,
        "digest": BASE.digest,
        "tokenizer_sha256": BASE.tokenizer_sha256,
        "vocab_size": BASE.vocab_size,
        "verified_by": "name",
    }


@pytest.mark.parametrize(
    ("fields", "claim", "expected"),
    [
        ({}, None, ("name", True)),
        ({"base_model_name_or_path": None}, None, ("shapes", False)),
        ({"base_model_name_or_path": "/pod/other"}, None, ("shapes", False)),
        ({"revision": COMMIT}, None, ("revision", True)),
        ({"revision": COMMIT[:7]}, None, ("revision", True)),
        ({"revision": "main"}, None, ("name", True)),
        ({"base_model_name_or_path": None}, {"base_id": "acme/tiny", "revision": COMMIT}, ("revision", True)),
        ({"base_model_name_or_path": None}, {"digest": BASE.digest}, ("digest", True)),
        ({"base_model_name_or_path": None}, {"tokenizer_sha256": BASE.tokenizer_sha256}, ("shapes", False)),
        ({}, {"base_id": None, "revision": None}, ("name", True)),
    ],
)
def test_what_speaks_for_the_base_is_said(tmp_path: Path, fields: Any, claim: Any, expected: tuple[str, bool]) -> None:
    assert verified_by(read(tmp_path, make_config(**fields), claim)) == expected


@pytest.mark.parametrize(
    ("fields", "claim", "code"),
    [
        ({"revision": OTHER}, None, "base_revision"),
        ({}, {"revision": OTHER}, "base_revision"),
        ({}, {"digest": "0" * 64}, "base_mismatch"),
        ({}, {"base_id": "acme/huge"}, "base_mismatch"),
        ({}, {"tokenizer_sha256": "0" * 64}, "tokenizer_mismatch"),
    ],
)
def test_contradiction_is_refused(tmp_path: Path, fields: Any, claim: Any, code: str) -> None:
    assert codes(tmp_path, make_config(**fields), claim) == {code}


def test_contradictions_are_told_together(tmp_path: Path) -> None:
    claim = {"digest": "0" * 64, "tokenizer_sha256": "1" * 64}
    assert codes(tmp_path, make_config(), claim) == {"base_mismatch", "tokenizer_mismatch"}


def test_revision_of_another_base_says_nothing(tmp_path: Path) -> None:
    config = make_config(base_model_name_or_path="other/model", revision=OTHER)
    assert verified_by(read(tmp_path, config)) == ("shapes", False)
    unknown = make_base()
    assert verified_by(read(tmp_path, make_config(revision=OTHER), base=unknown)) == ("name", True)


@pytest.mark.parametrize("claim", [[], {"digest": 1}, {"wat": "x"}, "text"])
def test_claim_that_cannot_be_read_is_refused(tmp_path: Path, claim: Any) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        read(tmp_path, make_config(), claim)
    assert {fault.code for fault in caught.value.faults} == {"base_claim"}


class Blobs:
    """The base's tokenizer, counted."""

    def __init__(self, document: Any) -> None:
        self.data = json.dumps(document).encode()
        self.num_reads = 0

    def read(self, sha256: str, offset: int, length: int) -> bytes:
        self.num_reads += 1
        return self.data

    def size(self, sha256: str) -> int:
        return len(self.data)


BPE = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
UNIGRAM = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["<s>", 0.0]]}}


@pytest.mark.parametrize("known", [BPE, UNIGRAM])
@pytest.mark.parametrize(
    ("name", "document", "fault"),
    [
        ("tokenizer.json", BPE, None),
        ("tokenizer.json", UNIGRAM, None),
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "c": 3}}}, "does not have it"),
        ("tokenizer.json", {"added_tokens": [{"id": 50, "content": "<x>"}]}, "does not have it"),
        ("tokenizer.json", {"added_tokens": [{"id": 1, "content": "<s>"}]}, "gives it the id 2"),
        ("tokenizer.json", {"added_tokens": [{"id": 100, "content": "<x>"}]}, "the base has 100 tokens"),
        ("tokenizer.json", {"added_tokens": {"a": 1}}, "not a list of tokens"),
        ("tokenizer.json", {"model": {"vocab": [[1, 2]]}}, "not a list of tokens and scores"),
        ("tokenizer.json", [], "not a JSON object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": "<s>"}}, "pad_token": "<s>"}, None),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<x>"}}}, "does not have it"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "not a map from ids"),
        ("added_tokens.json", {"<s>": 2}, None),
        ("added_tokens.json", {"<s>": 3}, "gives it the id 2"),
    ],
)
def test_tokens_that_the_base_lacks_are_refused(
    tmp_path: Path, known: Any, name: str, document: Any, fault: str | None
) -> None:
    tokens = StoredBaseTokens(Blobs(known))
    files = write_upload(tmp_path, make_config(), make_tensors(BASE, PATHS), **{name: json.dumps(document).encode()})
    if fault is None:
        assert read_adapter(files, BASE, RegistryConfig(), tokens).modules
        return
    with pytest.raises(InvalidAdapter, match=fault):
        read_adapter(files, BASE, RegistryConfig(), tokens)


def test_base_tokenizer_is_read_once_and_only_when_it_is_needed(tmp_path: Path) -> None:
    blobs = Blobs(BPE)
    tokens = StoredBaseTokens(blobs)
    read_adapter(plain_upload(tmp_path / "plain", BASE), BASE, RegistryConfig(), tokens)
    assert blobs.num_reads == 0
    files = write_upload(tmp_path / "with", make_config(), make_tensors(BASE, PATHS), **{"added_tokens.json": b"{}"})
    for _ in range(3):
        read_adapter(files, BASE, RegistryConfig(), tokens)
    assert blobs.num_reads == 1


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"ranks": (4, 8)}, "template_rank"),
        ({"targets": ("q_proj",)}, "template_targets"),
        ({"dtypes": ("BF16", "F16")}, "template_dtype"),
    ],
)
def test_template_warns_or_refuses(tmp_path: Path, rules: Any, code: str) -> None:
    warned = read(tmp_path, template=TemplateRules(**rules))
    assert {warning.code for warning in warned.warnings} == {code}
    assert codes(tmp_path, template=TemplateRules(policy="refuse", **rules)) == {code}


def test_adapter_that_fits_the_template_has_no_remarks(tmp_path: Path) -> None:
    rules = TemplateRules(policy="refuse", ranks=(2,), targets=("v_proj", "q_proj", "k_proj"), dtypes=("BF16",))
    tensors = {key: bf16([[1.0] * shape[1]] * shape[0]) for key, (_, shape, _) in make_tensors(BASE, PATHS).items()}
    assert read(tmp_path, tensors=tensors, template=rules).warnings == ()


def test_block_diagonal_factors_are_described_as_stored(tmp_path: Path) -> None:
    blocks = {"target_modules_bd_a": ["o_proj"], "target_modules_bd_b": ["q_proj"], "nblocks": 2}
    o, q = paths_of(BASE, "o_proj")[0], paths_of(BASE, "q_proj")[0]
    tensors = {
        f"base_model.model.{o}.lora_A.weight": f32([[1.0] * 4] * 2),
        f"base_model.model.{o}.lora_B.weight": f32([[1.0] * 2] * 8),
        f"base_model.model.{q}.lora_A.weight": f32([[1.0] * 8] * 2),
        f"base_model.model.{q}.lora_B.weight": f32([[1.0]] * 8),
    }
    config = make_config(target_modules=["o_proj", "q_proj"], use_bdlora=blocks)
    by_o, by_q = read(tmp_path, config, tensors=tensors).modules
    assert (by_o.a.shape, by_o.a_blocks, by_o.b_blocks) == ((2, 4), 2, 1)
    assert (by_q.b.shape, by_q.a_blocks, by_q.b_blocks) == ((8, 1), 1, 2)


@pytest.fixture
def registry(tmp_path: Path) -> Any:
    opened = open_registry(tmp_path / "data")
    opened.publish_base(BASE, actor="replica")
    yield opened
    opened.close()


def test_lists_tell_which_versions_are_unverified(registry: Registry, tmp_path: Path) -> None:
    registry.push("x", plain_upload(tmp_path / "a", BASE), owner="a")
    registry.push("x", plain_upload(tmp_path / "b", BASE, seed=1, base_model_name_or_path=None), owner="a")
    assert [version.base_verified for version in registry.adapter("x").versions] == [True, False]
    delta = registry.changes(0)
    assert delta is not None
    assert [version.base_verified for version in delta.adapters[0].versions] == [True, False]


def test_two_uploads_of_one_name_at_once_are_two_versions_without_mixing(registry: Registry, tmp_path: Path) -> None:
    uploads = [plain_upload(tmp_path / str(seed), BASE, seed=seed) for seed in range(2)]
    for attempt in range(20):
        barrier = threading.Barrier(4)
        found: list[tuple[int, int, str, bool]] = []

        name = f"x{attempt}"

        def push(seed: int, name: str = name, barrier: threading.Barrier = barrier, found: Any = found) -> None:
            barrier.wait()
            result = registry.push(name, uploads[seed], owner="a", activate=False)
            found.append((seed, result.version.number, result.version.digest, result.created))

        threads = [threading.Thread(target=push, args=(i % 2,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert sum(created for *_, created in found) == 2, "each content is new once"
        assert len({(seed, number, digest) for seed, number, digest, _ in found}) == 2
        assert {number for _, number, _, _ in found} == {1, 2}
        for seed, number, digest, _ in found:
            stored = registry.adapter(name).version(number)
            assert stored is not None
            assert stored.digest == digest
            manifest = registry.manifest(digest)
            blob = registry.blobs.read(manifest.blob_sha256, 0, manifest.blob_bytes)
            assert blob == uploads[seed]["adapter_model.safetensors"].read_bytes()
    registry.check_integrity()
