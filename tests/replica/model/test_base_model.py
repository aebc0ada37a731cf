"""What a loaded base says of itself, and which bases it refuses."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, T5Config

from registry.types import ModuleKind
from replica.errors import ModelError, OutOfMemory
from replica.model.batch import ForwardBatch, SequenceSpan
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.packed import BLOCK_SIZE, PackedRunner, load_base, prompts
from tests.tiny_models import (
    ARCHITECTURES,
    CHAT_TEMPLATE,
    CONTEXT_LENGTH,
    EOS_ID,
    VOCAB_SIZE,
    make_model,
    projection_shapes,
    write_tokenizer,
)

HEAD_DIM, FACTORS = 8, 4


@pytest.fixture
def llama(model_folder: ModelFolder) -> Path:
    return model_folder("llama")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sites_are_the_projections_of_the_layers_under_pefts_paths(
    architecture: str, model_folder: ModelFolder
) -> None:
    folder = model_folder(architecture)
    base = load_base(folder)
    assert {site.path: (site.in_features, site.out_features) for site in base.sites} == projection_shapes(folder)
    assert [site.index for site in base.sites] == list(range(len(base.sites)))
    kind = ModuleKind.CONV1D if architecture == "gpt2" else ModuleKind.LINEAR
    assert {site.kind for site in base.sites} == {kind}


def test_spec_digests_the_raw_weights(llama: Path) -> None:
    spec = load_base(llama, name="house").spec
    tensors = load_file(llama / "model.safetensors")
    for module in spec.modules:
        raw = tensors[f"{module.path}.weight"].numpy().tobytes()
        assert module.sha256 == hashlib.sha256(raw).hexdigest()
    document = json.dumps([m.model_dump(mode="json") for m in spec.modules], sort_keys=True, separators=(",", ":"))
    assert spec.digest == hashlib.sha256(document.encode()).hexdigest()
    assert [m.path for m in spec.modules] == sorted(m.path for m in spec.modules)
    assert (spec.base_id, spec.architecture) == ("house", "LlamaForCausalLM")


def test_spec_carries_tokenizer_template_and_lengths(llama: Path) -> None:
    base = load_base(llama)
    assert base.tokenizer_json == (llama / "tokenizer.json").read_bytes()
    assert base.spec.tokenizer_sha256 == hashlib.sha256(base.tokenizer_json).hexdigest()
    assert base.spec.chat_template == CHAT_TEMPLATE
    assert (base.spec.bos_token, base.spec.eos_token) == ("<bos>", "<eos>")
    assert (base.vocab_size, base.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert base.eos_token_ids == {EOS_ID}


def test_equal_weights_give_equal_digests_and_one_changed_value_another(llama: Path, tmp_path: Path) -> None:
    copy = make_model(tmp_path / "copy")
    assert load_base(copy).spec.digest == load_base(llama).spec.digest
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    changed, known = load_base(copy).spec, load_base(llama).spec
    assert changed.digest != known.digest
    assert [a.path for a, b in zip(changed.modules, known.modules, strict=True) if a != b] == [
        "model.layers.1.mlp.up_proj"
    ]


def test_several_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [260, 257]}))
    assert load_base(folder).spec.eos_token_ids == (257, 260)


def test_slow_tokenizer_files_are_converted(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "gpt2")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    assert json.loads(load_base(folder).tokenizer_json)["model"]["vocab"]["ab"] == 2


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_base(folder)


def test_kv_block_bytes_count_every_layers_own_heads(model_folder: ModelFolder) -> None:
    base = load_base(model_folder("gemma3"))
    assert base.kv_bytes_per_block(BLOCK_SIZE) == BLOCK_SIZE * 2 * (2 * (16 + 16)) * 4
    base.allocate_kv(5, BLOCK_SIZE)
    assert base._cache is not None
    kept = sum(tensor.nbytes for tensor in (*base._cache.keys, *base._cache.values))
    assert kept == 5 * base.kv_bytes_per_block(BLOCK_SIZE)


def test_cache_that_cannot_fit_is_out_of_memory(llama: Path) -> None:
    with pytest.raises(OutOfMemory, match="num_kv_blocks"):
        load_base(llama).allocate_kv(2**50, BLOCK_SIZE)


def test_short_block_table_is_a_broken_invariant(llama: Path) -> None:
    base = load_base(llama)
    base.allocate_kv(4, BLOCK_SIZE)
    ids = torch.arange(5)
    with pytest.raises(AssertionError, match="too short"):
        base.forward(ForwardBatch(ids, ids, (SequenceSpan(5, 5, (0,)),), torch.tensor([4])))


def test_step_that_wants_no_logits_still_fills_the_cache(llama: Path) -> None:
    base = load_base(llama)
    runner = PackedRunner(base)
    text = prompts([9])[0]
    whole = runner.step([(runner.start(text), 9)])
    stream = runner.start(text)
    ids = torch.tensor(text[:8])
    empty = base.forward(
        ForwardBatch(ids, torch.arange(8), (SequenceSpan(8, 8, stream.blocks),), torch.empty(0, dtype=torch.int64))
    )
    assert empty.shape == (0, VOCAB_SIZE)
    stream.cached = 8
    assert (runner.step([(stream, 1)]) - whole).abs().max() <= 1e-4


def test_context_length_beyond_the_base_is_refused(llama: Path) -> None:
    assert load_base(llama, context_length=64).context_length == 64
    with pytest.raises(ModelError, match=f"context_length is 300; allowed for this base: 16 to {CONTEXT_LENGTH}"):
        load_base(llama, context_length=300)


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="dynamic"):
        load_base(make_model(tmp_path, rope_parameters=rope))


def longrope(tmp_path: Path) -> Path:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * FACTORS,
        "long_factor": [1.5, 3.0, 6.0, 12.0],
        "original_max_position_embeddings": 32,
    }
    return make_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32)


@torch.inference_mode()
def transformers_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize(("context_length", "text_length"), [(CONTEXT_LENGTH, 40), (32, 20)])
def test_longrope_is_pinned_by_the_served_context_length(context_length: int, text_length: int, tmp_path: Path) -> None:
    """Long factors for a long context (even with a short neighbour in the batch), short ones for a short context."""
    folder = longrope(tmp_path)
    runner = PackedRunner(load_base(folder, context_length=context_length))
    text, neighbour = prompts([text_length, 5])
    together = runner.step([(runner.start(text), text_length), (runner.start(neighbour), 5)])
    alone = runner.step([(runner.start(neighbour), 5)])
    assert (together[0] - transformers_logits(folder, text)[-1]).abs().max() <= 1e-4
    assert (together[1] - alone[0]).abs().max() <= 1e-4


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2, vocab_size=16).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_base(tmp_path)


def save_random(folder: Path, model_type: str, **fields: object) -> Path:
    config = AutoConfig.for_model(model_type, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_quantised_base_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised"):
        load_base(folder)


def test_recurrent_model_is_refused(tmp_path: Path) -> None:
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "state_size": 4}
    with pytest.raises(ModelError, match=r"mamba.*not supported"):
        load_base(save_random(tmp_path, "mamba", **fields))


def test_bidirectional_model_is_refused(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
    }
    with pytest.raises(ModelError, match="causal"):
        load_base(save_random(tmp_path, "bert", **fields))


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    with pytest.raises(ModelError, match="sinks"):
        load_base(save_random(tmp_path, "gpt_oss", **fields))


def test_experts_are_no_sites_but_the_base_still_answers(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    folder = save_random(tmp_path, "mixtral", **fields)
    base = load_base(folder)
    assert {site.path.rpartition(".")[2] for site in base.sites} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    runner = PackedRunner(base)
    texts = prompts([9, 6])
    logits = runner.step([(runner.start(text), len(text)) for text in texts])
    for text, row in zip(texts, logits, strict=True):
        assert (row - transformers_logits(folder, text)[-1]).abs().max() <= 1e-4


def test_weights_that_do_not_load_are_a_model_error(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_base(folder)


def test_tiny_tokenizer_keeps_any_text(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    text = "héllo 🎈 wörld"
    assert tokenizer.decode(tokenizer.encode(text)) == text
