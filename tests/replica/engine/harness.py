"""An engine over fakes that a test steps by hand."""

from collections.abc import Sequence
from typing import Any

from replica.accounts import OnEnded
from replica.config import SchedulerConfig
from replica.engine import Engine
from replica.messages import GenerateRequest, SamplingParams
from replica.metrics import ReplicaMetrics
from replica.sampler import Sampler
from tests.fake_device import AsyncFakeModel, FakeLink
from tests.fakes import CollectingOutbox, FakeAdapters, FakeModel

MAX_STEPS = 20_000


class Bench:
    """One engine, its fakes, and an outbox for all requests; with a `link` its model runs behind the host."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_slots: int = 2,
        adapters: FakeAdapters | None = None,
        link: FakeLink | None = None,
        on_ended: OnEnded | None = None,
        metrics: ReplicaMetrics | None = None,
        **config: Any,
    ) -> None:
        fields = {"context_length": config.pop("context_length", 256), "eos_bias": config.pop("eos_bias", -100.0)}
        self.model = FakeModel(**fields) if link is None else AsyncFakeModel(link, **fields)
        self.adapters = adapters or FakeAdapters(num_slots)
        self.config = SchedulerConfig(**{"block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 8, **config})
        self.model.allocate_kv(num_blocks, self.config.block_size)
        self.outbox = CollectingOutbox()
        self.fatal: list[BaseException] = []
        self.engine = Engine(
            self.model,
            self.adapters,
            self.config,
            metrics or ReplicaMetrics(),
            num_blocks=num_blocks,
            num_slots=num_slots,
            on_fatal=self.fatal.append,
            sampler=Sampler(seed=0),
            link=link,
            on_ended=on_ended,
        )
        self.adapters.wake = self.engine.wake

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> None:
        self.engine.submit(make_request(name, prompt, max_tokens, **fields), self.outbox)

    @property
    def num_live(self) -> int:
        return len(self.engine._live)

    def step(self) -> bool:
        return self.engine._step()

    def finish(self) -> None:
        """Step until nothing is live, checking each step's leases and budget; then nothing may be held."""
        for _ in range(MAX_STEPS):
            if not self.num_live:
                break
            moved = self.step()
            assert moved or self.adapters.num_waiting, f"nothing waits for an adapter, yet nothing moves: {self.engine}"
            self.check()
        assert not self.num_live, f"not finished: {self.engine}"
        self.step()
        self.check()
        assert not self.adapters.leases

    def check(self) -> None:
        self.engine.check_integrity()
        for batch in self.model.batches:
            assert batch.token_ids.shape[0] <= self.config.max_batch_tokens
            assert len(batch.spans) <= self.config.max_num_seqs
        self.model.batches.clear()

    def greedy(self, prompt: Sequence[int], num_tokens: int, adapter: str | None = None) -> list[int]:
        key = 0.0 if adapter is None else self.adapters.key(adapter)
        return self.model.greedy(prompt, num_tokens, key)


def make_request(name: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request unless `temperature` says otherwise; sampling fields and request fields mixed."""
    of_request = ("tenant", "adapter", "weight", "expected_tokens", "max_slots")
    outer = {key: fields.pop(key) for key in of_request if key in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **fields})
    return GenerateRequest(name, **{"tenant": "t", "adapter": None, **outer}, prompt=tuple(prompt), sampling=sampling)
