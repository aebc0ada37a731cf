"""A base with random weights, random adapters in its arena, and the engine over both: what the GPU benchmarks run."""

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from replica.adapters.slots import SlotArena
from replica.adapters.weights import ImageLayout, PairPlace, alignment_elements, row_of_b, view_pairs
from replica.config import ModelConfig, SchedulerConfig
from replica.engine import Engine
from replica.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from replica.model.base_model import BaseModel
from replica.model.batch import ForwardBatch, LoraPair
from replica.model.cuda_graphs import CaptureReport
from replica.model.device_runner import StepLimits
from replica.sequence import RequestGroup


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 500_000.0

    def config(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **fields,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


SHAPES = {
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256, 8192),
    "tiny": Shape(64, 2, 4, 2, 16, 96, 512, 4096),
}


@dataclass(frozen=True)
class Sizes:
    """How much there is of everything."""

    shape: str = "llama-8b"
    num_adapters: int = 64
    rank: int = 16
    max_num_seqs: int = 64
    max_batch_tokens: int = 8192
    num_kv_blocks: int = 8192
    block_size: int = 16
    max_rank: int | None = None
    """The largest rank that is allowed; None: the adapters' own."""


def write_base(folder: Path, shape: Shape) -> None:
    """config.json and a byte-level tokenizer; the weights are drawn when the base is loaded."""
    (folder / "config.json").write_text(json.dumps(shape.config()))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def random_layout(base: BaseModel, rank: int) -> ImageLayout:
    """An image of rank `rank` on every projection of the base."""
    step, end, places = alignment_elements(base.dtype), 0, []
    for site in base.sites:
        a_offset = end
        b_offset = a_offset + -(-rank * site.in_features // step) * step
        end = b_offset + -(-row_of_b(rank) * site.out_features // step) * step
        sizes = (rank, site.in_features, site.out_features)
        places.append(PairPlace(site.index, site.path, *sizes, a_offset, b_offset, 2.0))
    return ImageLayout(base.dtype, tuple(places), end)


class FixedLease:
    """A slot that is there and stays."""

    ready, error = True, None

    def __init__(self, slot: int, pairs: Mapping[int, LoraPair]) -> None:
        self.slot, self.pairs = slot, pairs

    def release(self) -> None:
        """Nothing is ever evicted here."""


class ResidentAdapters:
    """`a0` to `aN` of random values, all in slots: adapters as the step loop sees them."""

    def __init__(self, base: BaseModel, num_adapters: int, rank: int) -> None:
        layout = random_layout(base, rank)
        self.num_image_bytes = layout.num_bytes
        num_bytes = num_adapters * layout.num_bytes
        self.arena = SlotArena(num_adapters, num_bytes, len(base.sites), base.device, base.dtype)
        self.leases = {f"a{index}": self._fill(layout) for index in range(num_adapters)}

    def _fill(self, layout: ImageLayout) -> FixedLease:
        slot = self.arena.allocate(layout)
        assert slot is not None, "the arena holds them all"
        start = self.arena.start(slot)
        self.arena.memory[start : start + layout.num_elements].normal_(std=0.01)
        pairs = view_pairs(self.arena.memory, start, layout)
        self.arena.publish(slot, pairs)
        return FixedLease(slot, pairs)

    def acquire(self, digest: str) -> FixedLease:
        return self.leases[digest]

    def load_s(self, digest: str) -> float:
        return 0.0

    def poll(self) -> None:
        """Nothing loads."""


class Silent:
    """An observer that remembers nothing."""

    def on_start(self, group: RequestGroup, waited_s: float) -> None: ...
    def on_step(self, batch: ForwardBatch, took_s: float) -> None: ...
    def on_end(self, reason: FinishReason) -> None: ...
    def on_withdrawn(self, digest: str) -> None: ...


@dataclass
class Collector:
    """Counts tokens until every request has ended."""

    num_requests: int
    num_tokens: int = 0
    num_ended: int = 0
    errors: list[Exception] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            self.num_tokens += len(chunk.token_ids)
            self.num_ended += chunk.finish_reason is not None
            if chunk.error is not None:
                self.errors.append(chunk.error)
        if self.num_ended == self.num_requests:
            self.done.set()


@dataclass(frozen=True)
class Start:
    """Where the time of starting went, seconds, and what it made."""

    load_s: float
    adapters_s: float
    prepare_s: float
    report: CaptureReport


@dataclass(frozen=True)
class Rig:
    """Everything that runs: base, adapters and engine."""

    base: BaseModel
    adapters: ResidentAdapters
    sizes: Sizes
    start: Start

    def engine(self) -> closing[Engine]:
        """A started engine; leaving the context closes it."""
        config = SchedulerConfig(
            policy="fcfs",
            max_batch_tokens=self.sizes.max_batch_tokens,
            max_num_seqs=self.sizes.max_num_seqs,
            num_kv_blocks=self.sizes.num_kv_blocks,
            block_size=self.sizes.block_size,
        )
        engine = Engine(
            self.base,
            self.adapters,
            config,
            Silent(),
            num_blocks=self.sizes.num_kv_blocks,
            num_slots=self.sizes.num_adapters,
        )
        engine.start()
        return closing(engine)


def build(sizes: Sizes, device: str, **model_fields: Any) -> Rig:
    """Load, fill and prepare; on a CPU the plain path runs, without kernels."""
    with TemporaryDirectory() as folder:
        write_base(Path(folder), SHAPES[sizes.shape])
        started_s = time.monotonic()
        fields = {"base": folder, "name": sizes.shape, "weights": "random", "device": device, **model_fields}
        base = BaseModel.load(ModelConfig.model_validate(fields))
    loaded_s = time.monotonic()
    base.allocate_kv(sizes.num_kv_blocks, sizes.block_size)
    with torch.inference_mode():
        adapters = ResidentAdapters(base, sizes.num_adapters, sizes.rank)
    filled_s = time.monotonic()
    base.attach_adapters(adapters.arena.memory, adapters.arena.tables, max_rank=sizes.max_rank or sizes.rank)
    report = base.prepare(StepLimits(sizes.max_batch_tokens, sizes.max_num_seqs))
    start = Start(loaded_s - started_s, filled_s - loaded_s, time.monotonic() - filled_s, report)
    return Rig(base, adapters, sizes, start)


def run_requests(engine: Engine, prompts: Sequence[Sequence[int]], digests: Sequence[str | None], out: int) -> float:
    """Submit all at once and wait for the last token; seconds. Raises what a request ended with."""
    collector = Collector(len(prompts))
    started_s = time.perf_counter()
    for index, (prompt, digest) in enumerate(zip(prompts, digests, strict=True)):
        sampling = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(f"r{index}", "t", digest, tuple(prompt), sampling), collector)
    if not collector.done.wait(timeout=300):
        raise TimeoutError(f"{collector.num_ended} of {len(prompts)} requests ended in 300 s: {engine}")
    took_s = time.perf_counter() - started_s
    if collector.errors:
        raise collector.errors[0]
    assert collector.num_tokens == out * len(prompts), f"{collector.num_tokens} tokens"
    return took_s


def arguments(question: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options that the scripts over a whole engine share."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def chosen_parts(text: str, parts: Sequence[str]) -> list[str]:
    """What `--parts` names; ends the program when one of them is none of `parts`."""
    chosen = text.split(",")
    if unknown := set(chosen) - set(parts):
        raise SystemExit(f"--parts names {', '.join(sorted(unknown))}; allowed: {', '.join(parts)}")
    return chosen
