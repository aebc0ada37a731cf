"""Adapters that must be refused for their tensors, their files or their archive."""

import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.corpus.bad_configs import bad
from tests.corpus.good import then, write
from tests.corpus.kit import CONFIG, PREFIX, WEIGHTS, Build, Case, Kit, Tensors, edit_tensors, rename, to_tar, to_zip

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def tensors_changed(change: Callable[[Tensors], object]) -> Build:
    return then(lambda folder: edit_tensors(folder, change))


def with_tensor(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Build:
    return tensors_changed(lambda tensors: tensors.update({key: torch.ones(shape, dtype=dtype)}))


def poked(value: float, dtype: torch.dtype = torch.float32) -> Build:
    def change(tensors: Tensors) -> None:
        tensors[f"{Q0}.lora_B.weight"] = tensors[f"{Q0}.lora_B.weight"].to(dtype)
        tensors[f"{Q0}.lora_B.weight"][3, 1] = value

    return tensors_changed(change)


def cases() -> Iterator[Case]:
    yield from keys()
    yield from shapes()
    yield from values()
    yield from weights()
    yield from folders()
    yield from tokenizers()
    yield from archives()


def keys() -> Iterator[Case]:
    yield bad("no-prefix", "prefix", then(lambda f: rename(f, lambda k: k.removeprefix(PREFIX))), "nothing_bound")
    for name, old, new in (
        ("language-model-inside", ".layers", ".language_model.layers"),
        ("language-model-outside", "model.model.", "model.language_model.model."),
    ):
        build = then(lambda f, o=old, n=new: rename(f, lambda k: k.replace(o, n)))
        yield bad(name, "prefix", build, "nothing_bound")
    compiled = then(lambda f: rename(f, lambda k: k.replace("model.model.", "model._orig_mod.model.")))
    yield bad("compiled", "compiled_prefix", compiled, "nothing_bound")
    for side in "AB":
        drop = tensors_changed(lambda t, s=side: t.pop(f"{Q0}.lora_{s}.weight"))
        yield bad(f"no-lora-{side}", "missing_tensor", drop)
    yield bad("empty", "nothing_bound", tensors_changed(lambda t: t.clear()))
    for name, key, code in (
        ("norm", f"{PREFIX}model.norm.weight", "base_weight"),
        ("head", f"{PREFIX}lm_head.weight", "base_weight"),
        ("base-layer", f"{Q0}.base_layer.weight", "base_weight"),
        ("base-bias", f"{Q0}.base_layer.bias", "bias"),
        ("magnitude", f"{Q0}.lora_magnitude_vector", "dora"),
        ("b-bias", f"{Q0}.lora_B.bias", "lora_bias"),
        ("diagonal", f"{Q0}.lora_diag", "kasa"),
        ("junk", "junk", "unexpected_tensor"),
        ("other-name", f"{Q0}.lora_A.other.weight", "unexpected_tensor"),
        ("embedding", f"{PREFIX}model.embed_tokens.lora_embedding_A", "embedding_lora"),
        ("token-rows", f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_tokens"),
    ):
        yield bad(f"tensor-{name}", code, with_tensor(key, 2, 32))
    for name, module in (("expert", "mlp.experts.0.w1"), ("fused-experts", "mlp.experts.base_layer")):
        key = f"{PREFIX}model.layers.0.{module}.lora_A.weight"
        yield bad(name, "expert_lora", with_tensor(key, 4, 32))
    deeper = then(lambda f: rename(f, lambda k: k.replace("layers.1.", "layers.7.")))
    yield bad("deeper-base", "unknown_module", deeper)
    yield bad("factor-twice", "duplicate_tensor", with_tensor(f"{Q0}.lora_A.default.weight", 4, 32))


def shapes() -> Iterator[Case]:
    yield bad("wider-base", "base_mismatch", with_tensor(f"{Q0}.lora_A.weight", 4, 64))
    yield bad("taller-base", "base_mismatch", with_tensor(f"{Q0}.lora_B.weight", 64, 4))
    yield bad("transposed", "base_mismatch", with_tensor(f"{Q0}.lora_A.weight", 32, 4))
    yield bad("other-rank", "shape", with_tensor(f"{Q0}.lora_A.weight", 5, 32))
    yield bad("one-dimension", "shape", with_tensor(f"{Q0}.lora_A.weight", 128))
    yield bad("rank-zero", "shape", with_tensor(f"{Q0}.lora_A.weight", 0, 32))
    unsorted = {"q_proj": 4, "layers.1.self_attn.q_proj": 8}
    yield bad("patterns-that-peft-sorted", "shape", lambda kit, folder: kit.save(folder, r=16, rank_pattern=unsorted))
    yield bad("rank-too-large", "rank_too_large", lambda kit, folder: kit.save(folder, r=65))


def values() -> Iterator[Case]:
    yield bad("nan", "not_finite", poked(float("nan")))
    yield bad("infinite", "not_finite", poked(-float("inf")))
    yield bad("nan-in-fp16", "not_finite", poked(float("nan"), torch.float16))
    yield bad("overflow", "overflow", poked(3.4e38))
    for dtype in (torch.int8, torch.float64, torch.float8_e4m3fn):
        build = with_tensor(f"{Q0}.lora_A.weight", 4, 32, dtype=dtype)
        yield bad(f"dtype-{str(dtype).removeprefix('torch.')}", "dtype", build, "missing_tensor")


def bytes_changed(change: Callable[[bytes], bytes]) -> Build:
    return then(lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes())))


def weights() -> Iterator[Case]:
    yield bad("cut-in-half", "truncated", bytes_changed(lambda data: data[: len(data) // 2]))
    yield bad("cut-by-one", "truncated", bytes_changed(lambda data: data[:-1]))
    yield bad("no-bytes", "truncated", bytes_changed(lambda data: b""))
    yield bad("lfs-pointer", "lfs_pointer", bytes_changed(lambda data: LFS))
    yield bad("bytes-behind", "header", bytes_changed(lambda data: data + b"x"))
    yield bad("not-safetensors", "header", bytes_changed(lambda data: b"\xff" * 64))


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def folders() -> Iterator[Case]:
    yield bad("pickle-alone", "pickle", then(pickled), "weights_missing")
    yield bad("pickle-too", "pickle", then(lambda f: write(f, adapter_model_DOT_bin=b"\x80")))
    index = {"adapter_model_DOT_safetensors_DOT_index_DOT_json": b"{}"}
    yield bad("sharded", "sharded", then(lambda f: write(f, **index)))
    yield bad("no-config", "config_missing", then(lambda f: (f / CONFIG).unlink()))
    yield bad("no-weights", "weights_missing", then(lambda f: (f / WEIGHTS).unlink()))
    yield bad("two-adapters", "several_adapters", two_adapters)
    yield bad("link", "not_a_file", then(lambda f: (f / "README.link").symlink_to(f / CONFIG)))


def two_adapters(kit: Kit, folder: Path) -> None:
    for name in ("one", "two"):
        kit.save(folder / name)
        shutil.rmtree(folder / name / "x", ignore_errors=True)


def tokenizers() -> Iterator[Case]:
    for name, text in {"new": '{"<new>": 264}', "moved": '{"<pad>": 259}', "negative": '{"<x>": -1}'}.items():
        build = then(lambda f, t=text: (f / "added_tokens.json").write_text(t))
        yield bad(f"added-token-{name}", "added_tokens", build)
    yield bad("tokenizer-grown", "added_tokens", grown_tokenizer)
    yield bad("tokenizer-broken", "tokenizer", then(lambda f: (f / "tokenizer.json").write_text("{")))


def grown_tokenizer(kit: Kit, folder: Path) -> None:
    kit.save(folder)
    document = json.loads((kit.folder / "tokenizer.json").read_text())
    document["added_tokens"].append({"id": 261, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(document))


def archives() -> Iterator[Case]:
    for name, path in {"up": "../x", "root": "/etc/x", "backslash": "a\\b", "inside": "a/../../b"}.items():
        yield bad(f"zip-path-{name}", "unsafe_path", then(lambda f, p=path: to_zip(f, extra={p: b"x"})))
        yield bad(f"tar-path-{name}", "unsafe_path", then(lambda f, p=path: to_tar(f, extra=[tarfile.TarInfo(p)])))
    for name, kind in {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}.items():
        yield bad(f"tar-link-{name}", "not_a_file", then(lambda f, k=kind: to_tar(f, extra=[link(k)])))
    yield bad("zip-link", "not_a_file", then(zip_with_link))
    yield bad("zip-case-twins", "ambiguous_files", then(lambda f: to_zip(f, extra={"Adapter_Config.json": b"{}"})))
    yield bad("zip-entry-twice", "ambiguous_files", then(zip_with_twin))
    yield bad("zip-bomb", "limit_exceeded", then(lambda f: to_zip(f, extra={"zeros": bytes(8_000_000)})))
    yield bad("tar-bomb", "limit_exceeded", then(tar_bomb))
    many = {f"{i}.txt": b"" for i in range(200)}
    yield bad("zip-of-many", "limit_exceeded", then(lambda f: to_zip(f, extra=many)))
    yield bad("tar-of-many", "limit_exceeded", then(lambda f: to_tar(f, extra=[tarfile.TarInfo(n) for n in many])))
    yield bad("zip-cut", "archive", then(lambda f: cut(f, to_zip)))
    yield bad("tar-cut", "archive", then(lambda f: cut(f, to_tar)))
    yield bad("tar-bz2", "archive", then(lambda f: to_tar(f, "w:bz2")))
    yield bad("zip-with-pickle", "pickle", then(lambda f: to_zip(f, extra={"adapter_model.bin": b"\x80"})))


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("notes.txt")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def zip_with_link(folder: Path) -> None:
    to_zip(folder)
    info = zipfile.ZipInfo("notes.txt")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(folder / "adapter.zip", "a") as archive:
        archive.writestr(info, "/etc/passwd")


def zip_with_twin(folder: Path) -> None:
    to_zip(folder)
    path = folder / "adapter.zip"
    extra = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(extra, "a") as archive:
        archive.writestr("ADAPTER_config.json", "{}")
    data = extra.getvalue().replace(b"ADAPTER_config.json", b"adapter_config.json")
    path.write_bytes(data)


def tar_bomb(folder: Path) -> None:
    info = tarfile.TarInfo("zeros")
    info.size = 8_000_000
    with tarfile.open(folder / "more.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    (folder / CONFIG).unlink()
    (folder / WEIGHTS).unlink()
    (folder / "README.md").unlink()


def cut(folder: Path, pack: Callable[[Path], None]) -> None:
    pack(folder)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
