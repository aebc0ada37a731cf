"""Small adapters made by hand with numpy, and the base they fit, so that tests of the registry need no torch."""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.exc import IntegrityError

from registry.config import RegistryConfig
from registry.digest import canonical_json
from registry.service import Registry
from registry.types import BaseSpec, ModuleKind, ModuleSpec, VersionRecord, VersionState

HIDDEN, KV, INNER, VOCAB, LAYERS = 8, 4, 12, 100, 2
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
PREFIX = "base_model.model."

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Key -> dtype, shape, bytes."""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_base(base_id: str = "acme/tiny", num_layers: int = LAYERS, weights: str = "w") -> BaseSpec:
    modules = tuple(
        ModuleSpec(path=path, in_features=fan_in, out_features=out, sha256=sha(weights + path))
        for layer in range(num_layers)
        for path, (fan_in, out) in ((f"model.layers.{layer}.{name}", width) for name, width in WIDTHS.items())
    )
    return spec_of(base_id, modules)


def make_conv_base() -> BaseSpec:
    path = "transformer.h.0.attn.c_attn"
    module = ModuleSpec(path=path, in_features=8, out_features=24, kind=ModuleKind.CONV1D, sha256=sha(path))
    return spec_of("acme/tiny-gpt2", (module,))


def spec_of(base_id: str, modules: Sequence[ModuleSpec]) -> BaseSpec:
    digest = hashlib.sha256(canonical_json([module.model_dump(mode="json") for module in modules])).hexdigest()
    return BaseSpec(
        base_id=base_id,
        digest=digest,
        architecture="TinyForCausalLM",
        modules=tuple(modules),
        context_length=64,
        vocab_size=VOCAB,
        tokenizer_sha256=sha("tokenizer"),
        chat_template=None,
        bos_token=None,
        eos_token=None,
        eos_token_ids=(0,),
    )


def f32(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(values, dtype="<f4")
    return "F32", array.shape, array.tobytes()


def f16(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(values, dtype="<f2")
    return "F16", array.shape, array.tobytes()


def bf16(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(values, dtype="<f4")
    return "BF16", array.shape, (array.view("<u4") >> 16).astype("<u2").tobytes()


def paths_of(base: BaseSpec, *names: str) -> list[str]:
    return [module.path for module in base.modules if module.path.rpartition(".")[2] in names]


def make_tensors(base: BaseSpec, paths: Sequence[str], rank: int | Mapping[str, int] = 2, seed: int = 0) -> Tensors:
    """A LoRA pair of F32 noise for each of `paths`."""
    rng = np.random.default_rng(seed)
    modules = {module.path: module for module in base.modules}
    tensors: Tensors = {}
    for path in paths:
        r = rank if isinstance(rank, int) else rank[path]
        tensors[f"{PREFIX}{path}.lora_A.weight"] = f32(rng.normal(size=(r, modules[path].in_features)))
        tensors[f"{PREFIX}{path}.lora_B.weight"] = f32(rng.normal(size=(modules[path].out_features, r)))
    return tensors


def safetensors_bytes(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """The file format, with the tensors in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return framed(json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def framed(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def make_config(**fields: Any) -> dict[str, Any]:
    """What PEFT writes, as far as it matters, with `fields` changed."""
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "acme/tiny",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "init_lora_weights": True,
        "qalora_group_size": 16,
        "megatron_core": "megatron.core",
        "runtime_config": {"ephemeral_gpu_offload": False},
        "lora_dropout": 0.05,
        "inference_mode": True,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return {**plain, **fields}


def write_upload(folder: Path, config: Any, weights: bytes | Tensors, **more: bytes) -> dict[str, Path]:
    """Write an upload and return its file map. `config` may be raw bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "adapter_config.json": config if isinstance(config, bytes) else json.dumps(config).encode(),
        "adapter_model.safetensors": weights if isinstance(weights, bytes) else safetensors_bytes(weights),
        **more,
    }
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return {name: folder / name for name in contents}


def plain_upload(folder: Path, base: BaseSpec, seed: int = 0, **fields: Any) -> dict[str, Path]:
    """A sound adapter of rank 2 on q and v; another `seed` gives another content."""
    tensors = make_tensors(base, paths_of(base, "q_proj", "v_proj"), seed=seed)
    return write_upload(folder, make_config(**fields), tensors)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


POSTGRES_VARIABLE = "TEST_POSTGRES_URL"
"""When it names a server, registries of tests keep their rows there, each folder in a schema of its own."""


def open_registry(folder: Path, clock: Callable[[], float] | None = None, **settings: Any) -> Registry:
    """A registry in `folder`; opened twice, two registries over the same rows and blobs. Anybody may call adapters."""
    settings = {"new_adapters": "public", **settings}
    server = os.environ.get(POSTGRES_VARIABLE)
    if server is not None:
        settings = {"database_url": postgres_schema(server, folder), **settings}
    return Registry.open(RegistryConfig(data_dir=folder, **settings), clock or Clock())


def postgres_schema(server: str, folder: Path) -> str:
    """The URL of a schema that belongs to this folder, created when it is new."""
    name = f"t_{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]}"
    engine = create_engine(server, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, suppress(IntegrityError):  # two processes at once
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {name}"))
    return make_url(server).update_query_dict({"options": f"-csearch_path={name}"}).render_as_string(False)


def version(number: int, state: VersionState = VersionState.ACTIVE) -> VersionRecord:
    """A version that was never uploaded, for tests that need its record only."""
    return VersionRecord(
        number=number,
        digest=sha(str(number)),
        state=state,
        created_at_s=0.0,
        num_bytes=1,
        max_rank=2,
        target_names=("q_proj",),
    )
