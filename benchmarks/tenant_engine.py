"""One engine stepped by hand under a trace of several tenants, and what each of them got. No question of its own."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from replica.arrival_queue import WaitingQueue
from replica.config import SchedulerConfig
from replica.engine import Engine
from replica.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from replica.model.batch import ForwardBatch
from replica.sequence import RequestGroup
from replica.step import StepModel
from tests.fakes import FakeAdapters, PacedModel, base_spec

MAX_TICKS = 200_000


@dataclass(frozen=True)
class Arrival:
    """A request that comes before the engine's turn number `tick`."""

    tick: int
    request: GenerateRequest


def arrival(
    tick: int, name: str, tenant: str, num_prompt: int, num_output: int, weight: float = 1.0, spread: int = 1
) -> Arrival:
    """A greedy request for exactly `num_output` tokens; its prompt is its own."""
    seed = sum(map(ord, name))
    prompt = tuple((seed + 7 * place) % 47 for place in range(num_prompt))
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    return Arrival(tick, GenerateRequest(name, tenant, None, prompt, sampling, weight=weight, spread=spread))


@dataclass
class Record:
    """One request's times: in turns of the loop, and in seconds."""

    tenant: str
    submitted_tick: int
    submitted_s: float
    first_tick: int = -1
    first_s: float = 0.0
    num_tokens: int = 0

    @property
    def steps_to_first(self) -> int:
        """Turns of the loop from submission to the first token; 1 is the least."""
        return self.first_tick - self.submitted_tick + 1


class FreeModel(PacedModel):
    """Takes no time; a step's tokens are counted."""

    def __init__(self) -> None:
        super().__init__(base_spec(context_length=8192), step_s=0.0)
        self.num_tokens = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.num_tokens += int(batch.token_ids.shape[0])
        return self._row.expand(batch.logit_rows.shape[0], -1)


@dataclass
class Run:
    """A served trace. `service` is prompt tokens + `output_cost` x output tokens by tenant, as they were served."""

    engine: Engine
    output_cost: float = 1.0
    tick: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    service: Counter[str] = field(default_factory=Counter)
    busy_ticks: int = 0
    on_tick: Callable[["Run"], None] | None = None
    _live: dict[str, RequestGroup] = field(default_factory=dict)
    _counted: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def num_live(self) -> int:
        return len(self.engine._live)

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.error is not None:
                raise chunk.error
            record = self.records[chunk.request_id]
            if record.first_tick < 0 and chunk.token_ids:
                record.first_tick, record.first_s = self.tick, time.perf_counter()
            record.num_tokens += len(chunk.token_ids)

    def submit(self, request: GenerateRequest) -> None:
        self.records[request.request_id] = Record(request.tenant, self.tick, time.perf_counter())
        self.engine.submit(request, self)
        group = self.engine._live.get(request.request_id)
        assert group is not None
        self._live[request.request_id] = group

    def step(self) -> None:
        before = self.engine.counts.num_steps
        self.engine._step()
        self.busy_ticks += self.engine.counts.num_steps - before
        self._count_service()
        if self.on_tick is not None:
            self.on_tick(self)
        self.tick += 1

    def _count_service(self) -> None:
        for key, group in list(self._live.items()):
            output = sum(sequence.num_output for sequence in group.sequences)
            served = group.num_prompt_computed + self.output_cost * output
            self.service[group.tenant] += served - self._counted[key]
            self._counted[key] = served
            if group.is_ended:
                del self._live[key], self._counted[key]

    def waiting(self) -> Counter[str]:
        """Requests by tenant of which nothing was computed yet."""
        return Counter(group.tenant for group in self._live.values() if not group.num_prompt_computed)

    def serve(self, trace: Iterable[Arrival], until_tick: int = MAX_TICKS) -> "Run":
        """Play the trace; go on until all has ended, or to `until_tick`."""
        coming = sorted(trace, key=lambda each: each.tick, reverse=True)
        while (coming or self.num_live) and self.tick < until_tick:
            while coming and coming[-1].tick <= self.tick:
                self.submit(coming.pop().request)
            self.step()
        return self


class Unobserved:
    """Nobody looks."""

    def on_start(self, group: RequestGroup, waited_s: float) -> None: ...
    def on_step(self, batch: ForwardBatch, took_s: float) -> None: ...
    def on_end(self, reason: FinishReason) -> None: ...
    def on_withdrawn(self, digest: str) -> None: ...


def make_run(
    config: SchedulerConfig,
    num_blocks: int,
    *,
    model: StepModel | None = None,
    queue: WaitingQueue[RequestGroup] | None = None,
    output_cost: float = 1.0,
) -> Run:
    """An engine that nothing has been sent to; with `queue` as its admission policy, instead of the configured one."""
    engine = Engine(model or FreeModel(), FakeAdapters(1), config, Unobserved(), num_blocks=num_blocks, num_slots=1)
    if queue is not None:
        engine._admission._queue = queue
    return Run(engine, output_cost)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the part `q` of all are no larger than."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * len(ordered) * 1000) // 1000) - 1))]
