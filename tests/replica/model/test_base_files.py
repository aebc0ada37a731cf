"""Where a base comes from: names, folders, GGUF files converted once, and clear errors for everything else."""

import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from replica.config import ModelConfig
from replica.errors import ModelError
from replica.model import base_files
from replica.model.base_files import resolve_base, resolve_device, resolve_dtype
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.packed import load_base
from tests.tiny_models import CHAT_TEMPLATE

HIDDEN, HEADS, LAYERS, WIDE = 16, 2, 2, 24


def write_gguf(path: Path) -> Path:
    """A tiny random Llama in GGUF, with a byte-level vocabulary."""
    tokens = [chr(33 + index) for index in range(88)] + ['!"', "#$", "<s>", "</s>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 90 + [3, 3])
    writer.add_token_merges(['! "', "# $"])
    writer.add_bos_token_id(90)
    writer.add_eos_token_id(91)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, shape in gguf_shapes(len(tokens)).items():
        seed = sum(name.encode())
        writer.add_tensor(name, np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        square = ("attn_q", "attn_k", "attn_v", "attn_output")
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN, HIDDEN) for name in square}
        shapes |= {f"blk.{layer}.{name}.weight": (WIDE, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down.weight": (HIDDEN, WIDE)}
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    return shapes


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny-Llama.Q4_1.gguf")


def config_of(base: Path | str, **fields: object) -> ModelConfig:
    return ModelConfig.model_validate({"base": str(base), "device": "cpu", **fields})


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("/x/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("/x/qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("/x/Llama-3.1-8B.IQ3_XS.gguf", "Llama-3.1-8B"),
        ("/x/model-F16.gguf", "model"),
        ("/x/model.gguf", "model"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("/x/my-base/", "my-base"),
    ],
)
def test_base_name_is_the_last_part_without_quantisation(base: str, name: str) -> None:
    assert ModelConfig(base=base).base_name == name


def test_configured_name_wins() -> None:
    assert ModelConfig(base="/x/y.gguf", name="house-model").base_name == "house-model"


def test_folder_resolves_to_itself(model_folder: ModelFolder) -> None:
    assert resolve_base(config_of(model_folder("llama"))) == model_folder("llama")


@pytest.mark.parametrize("base", ["/no/such/folder", "./nope", "missing.gguf", "a/b/c", "../up"])
def test_missing_path_is_refused_without_asking_the_hub(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_files, "_snapshot", lambda config: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_base(config_of(base))


def test_unreachable_hub_id_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match="no route"):
        resolve_base(config_of("someone/something"))


def test_hub_snapshot_is_asked_for_its_revision(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(repo: str, **kwargs: object) -> str:
        asked.update(repo=repo, **kwargs)
        return str(model_folder("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_base(config_of("someone/something", revision="abc")) == model_folder("llama")
    assert (asked["repo"], asked["revision"]) == ("someone/something", "abc")


def test_other_files_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"allowed: a \.gguf file"):
        resolve_base(config_of(tmp_path / "weights.bin"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_base(config_of(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="pickled"):
        resolve_base(config_of(tmp_path))


def test_gguf_is_converted_with_its_weights_and_tokenizer(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = resolve_base(config_of(tiny_gguf, cache_dir=tmp_path / "cache"))
    weights = load_file(folder / "model.safetensors")
    name = "blk.1.ffn_up.weight"
    expected = np.random.default_rng(sum(name.encode())).standard_normal((WIDE, HIDDEN)).astype(np.float32) * 0.2
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], torch.from_numpy(expected))
    base = load_base(folder)
    assert base.context_length == 64
    assert base.eos_token_ids == {91}
    assert base.spec.chat_template == CHAT_TEMPLATE
    assert "quantization_config" not in (folder / "config.json").read_text()


def test_gguf_is_converted_once_by_concurrent_replicas(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    convert = base_files._convert

    def counted(source: Path, folder: Path, dtype: base_files.DType) -> None:
        calls.append(source)
        convert(source, folder, dtype)

    monkeypatch.setattr(base_files, "_convert", counted)
    config = config_of(tiny_gguf, cache_dir=tmp_path / "cache")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_base(config))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 3
    assert len(set(found)) == 1


def test_conversion_that_died_half_way_is_done_again(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_gguf, cache_dir=tmp_path / "cache")

    def die(source: Path, folder: Path, dtype: base_files.DType) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(base_files, "_convert", die)
        with pytest.raises(MemoryError):
            resolve_base(config)
    folder = resolve_base(config)
    assert (folder / "config.json").read_text() != "half"
    assert sorted(os.listdir(folder.parent)) == sorted([folder.name, f"{folder.name}.lock"])


def test_broken_gguf_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF not really")
    with pytest.raises(ModelError, match="cannot be converted"):
        resolve_base(config_of(tmp_path / "x.gguf", cache_dir=tmp_path / "cache"))


def test_auto_is_float32_on_cpu_and_bfloat16_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_dtype(ModelConfig(base="x")) == "bfloat16"
    assert resolve_dtype(ModelConfig(base="x", device="cpu")) == "float32"
    assert resolve_dtype(ModelConfig(base="x", dtype="float16")) == "float16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_dtype(ModelConfig(base="x")) == "float32"
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device(ModelConfig(base="x", device="cuda"))
