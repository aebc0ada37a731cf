"""Fakes that more than one test needs. Each keeps the promises of what it stands for, and can be looked into."""

import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from registry.types import BaseSpec
from replica.adapters.slot_tables import SlotTables
from replica.config import ModelConfig
from replica.errors import AdapterUnavailable, UnknownAdapter
from replica.messages import TokenChunk
from replica.model.batch import ForwardBatch, LoraPair, SequenceSpan, Site
from replica.model.device_runner import StepLimits

VOCAB_SIZE = 50
EOS_ID = 49
NO_ADAPTER = 0.0


def base_spec(vocab_size: int = VOCAB_SIZE, context_length: int = 256, eos: Sequence[int] = (EOS_ID,)) -> BaseSpec:
    """A spec for fakes: no modules, so no adapter fits it."""
    return BaseSpec(
        base_id="fake",
        digest="0" * 64,
        architecture="Fake",
        modules=(),
        context_length=context_length,
        vocab_size=vocab_size,
        tokenizer_sha256="0" * 64,
        chat_template=None,
        bos_token=None,
        eos_token=None,
        eos_token_ids=tuple(eos),
    )


class FakeModel:
    """Logits that depend on every token in the sequence's KV blocks and on the adapter of the row that wrote it.

    A wrong block table, position, segment or cache content changes the text, as it would with a real model.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    sites: tuple[Site, ...] = ()
    tokenizer_json = b"{}"

    def __init__(self, vocab_size: int = VOCAB_SIZE, context_length: int = 256, eos_bias: float = -100.0) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.eos_token_ids = frozenset({EOS_ID})
        self.eos_bias = eos_bias
        self.spec = base_spec(vocab_size, context_length)
        self.block_size = 16
        self.batches: list[ForwardBatch] = []
        self.poisoned: set[float] = set()
        """Adapter keys whose rows give NaN."""
        self.error: Exception | None = None
        self._kv: dict[tuple[int, int], tuple[int, float]] = {}

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 8 * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size

    def attach_adapters(self, memory: torch.Tensor, tables: SlotTables, max_rank: int) -> None:
        """Segments bring all."""

    def prepare(self, limits: StepLimits) -> None:
        """There is nothing to compile."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.batches.append(batch)
        spans = list(_rows(batch))
        for span, row in spans:
            place = self._place(span, int(batch.positions[row]))
            self._kv[place] = (int(batch.token_ids[row]), _adapter_key(batch, row))
        rows = [self.logits(self._history(batch, *spans[row])) for row in batch.logit_rows.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _history(self, batch: ForwardBatch, span: SequenceSpan, row: int) -> tuple[tuple[int, float], ...]:
        return tuple(self._kv[self._place(span, position)] for position in range(int(batch.positions[row]) + 1))

    def _place(self, span: SequenceSpan, position: int) -> tuple[int, int]:
        return span.block_table[position // self.block_size], position % self.block_size

    def logits(self, history: tuple[tuple[int, float], ...]) -> torch.Tensor:
        """Logits after `history`, pairs of token id and adapter key."""
        if history[-1][1] in self.poisoned:
            return torch.full((self.vocab_size,), float("nan"))
        rng = np.random.default_rng(hash(history) & 0xFFFF_FFFF)
        logits = torch.from_numpy(rng.standard_normal(self.vocab_size).astype(np.float32)) * 3
        logits[EOS_ID] += self.eos_bias
        return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int, key: float = NO_ADAPTER) -> list[int]:
        """The text that a server must produce for `prompt` at temperature 0."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            tokens.append(int(self.logits(tuple((token, key) for token in tokens)).argmax()))
        return tokens[len(prompt) :]


def _rows(batch: ForwardBatch) -> Iterator[tuple[SequenceSpan, int]]:
    """Each row with the sequence it belongs to."""
    row = 0
    for span in batch.spans:
        for _ in range(span.num_tokens):
            yield span, row
            row += 1


def _adapter_key(batch: ForwardBatch, row: int) -> float:
    keys = [segment.pairs[0].scale for segment in batch.segments if segment.start <= row < segment.end]
    assert len(keys) <= 1, "a row lies in two segments"
    return keys[0] if keys else NO_ADAPTER


class PacedModel:
    """A base for benchmarks of everything around it: a step takes a set time, and every token is the same.

    A step sleeps `step_s` plus `token_s` for each token of the batch; `token_id` is what a greedy choice gives.
    `kv_token_bytes` is what the KV cache would keep of a token.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        spec: BaseSpec,
        tokenizer_json: bytes = b"{}",
        *,
        sites: Sequence[Site] = (),
        step_s: float = 0.01,
        token_s: float = 0.0,
        token_id: int = 0,
        kv_token_bytes: int = 1,
    ) -> None:
        self.spec = spec
        self.tokenizer_json = tokenizer_json
        self.sites = tuple(sites)
        self.vocab_size = spec.vocab_size
        self.context_length = spec.context_length
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        self._step_s = step_s
        self._token_s = token_s
        self._kv_token_bytes = kv_token_bytes
        self._row = torch.zeros(1, spec.vocab_size)
        self._row[0, token_id] = 10.0

    @classmethod
    def loader(
        cls, spec: BaseSpec, tokenizer_json: bytes = b"{}", **pace: float
    ) -> "Callable[[ModelConfig], PacedModel]":
        """For `Replica(..., model_loader=PacedModel.loader(spec))`."""
        return lambda config: cls(spec, tokenizer_json, **pace)  # type: ignore[arg-type]

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self._kv_token_bytes * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Nothing is kept."""

    def attach_adapters(self, memory: torch.Tensor, tables: SlotTables, max_rank: int) -> None:
        """Adapters cost nothing."""

    def prepare(self, limits: StepLimits) -> None:
        """There is nothing to compile."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        time.sleep(self._step_s + self._token_s * batch.token_ids.shape[0])
        return self._row.expand(batch.logit_rows.shape[0], -1)


class FakeLease:
    """A lease of FakeAdapters; releasing it twice is an error."""

    def __init__(self, owner: "FakeAdapters", digest: str) -> None:
        self.digest = digest
        self.error: Exception | None = None
        self.slot: int | None = None
        self._owner = owner
        self._is_released = False

    @property
    def ready(self) -> bool:
        return self.slot is not None

    @property
    def pairs(self) -> Mapping[int, LoraPair]:
        assert self.ready
        assert not self._is_released
        empty = torch.empty(0)
        return {0: LoraPair(empty, empty, self._owner.key(self.digest))}

    def release(self) -> None:
        assert not self._is_released, f"the lease on {self.digest} was released twice"
        self._is_released = True
        self._owner.leases.remove(self)


class FakeAdapters:
    """Adapter slots without tensors: a load takes `load_polls` polls, and a free slot goes to the oldest waiter."""

    def __init__(
        self, num_slots: int, *, load_polls: int = 1, broken: Collection[str] = (), unknown: Collection[str] = ()
    ) -> None:
        self.leases: list[FakeLease] = []
        self.num_loads = 0
        self.wake: Callable[[], None] = lambda: None
        self.is_held = False
        """While set, no load ends."""
        self.load_times_s: dict[str, float] = {}
        """Seconds that a load of an adapter takes, where it matters."""
        self._load_polls = load_polls
        self._broken, self._unknown = set(broken), set(unknown)
        self._slots: list[str | None] = [None] * num_slots
        self._age: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Leases that are neither ready nor failed."""
        return sum(not lease.ready and lease.error is None for lease in self.leases)

    def key(self, digest: str) -> float:
        """What FakeModel sees of an adapter."""
        return 1.0 + zlib.crc32(digest.encode())

    def acquire(self, digest: str) -> FakeLease:
        if digest in self._unknown:
            raise UnknownAdapter(f"adapter {digest} was never staged")
        lease = FakeLease(self, digest)
        if digest in self._slots:
            lease.slot = self._slots.index(digest)
        self.leases.append(lease)
        return lease

    def load_s(self, digest: str) -> float:
        return self.load_times_s.get(digest, 0.0)

    def poll(self) -> None:
        waiting: dict[str, list[FakeLease]] = defaultdict(list)
        for lease in self.leases:
            if not lease.ready and lease.error is None:
                waiting[lease.digest].append(lease)
        for digest, leases in waiting.items():
            self._settle(digest, leases)
        if waiting and not self.is_held:
            self.wake()

    def _settle(self, digest: str, leases: list[FakeLease]) -> None:
        self._age[digest] += not self.is_held
        if self._age[digest] < self._load_polls:
            return
        if digest in self._broken:
            for lease in leases:
                lease.error = AdapterUnavailable(f"adapter {digest} is broken")
            return
        slot = self._free_slot()
        if slot is not None:
            self._slots[slot] = digest
            self.num_loads += 1
            del self._age[digest]
            for lease in leases:
                lease.slot = slot

    def _free_slot(self) -> int | None:
        pinned = {lease.slot for lease in self.leases if lease.ready}
        return next((slot for slot in range(len(self._slots)) if slot not in pinned), None)


class CollectingOutbox:
    """Keeps every chunk, and checks that a choice gets none after its last."""

    def __init__(self) -> None:
        self.puts: list[list[TokenChunk]] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], str] = {}
        self.errors: dict[tuple[str, int], Exception] = {}

    @property
    def chunks(self) -> list[TokenChunk]:
        return [chunk for chunks in self.puts for chunk in chunks]

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        self.puts.append(list(chunks))
        for chunk in chunks:
            key = (chunk.request_id, chunk.index)
            assert key not in self.reasons, f"a chunk after the last one of {key}"
            self.tokens[key] += chunk.token_ids
            if chunk.finish_reason is not None:
                self.reasons[key] = chunk.finish_reason
            if chunk.error is not None:
                self.errors[key] = chunk.error
