"""The step loop: take commands, poll the adapters, schedule, launch, read back, emit. Knows nothing of asyncio or HTTP.

All state behind it (scheduler, blocks, leases) belongs to one thread; other threads leave commands and read counts.
On an asynchronous device a step is launched before the one ahead of it is read back: what the host does with the
tokens of one step, the device spends on the next.
"""

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from replica.accounts import NS_PER_S, Accounts, OnEnded, OnPreempted
from replica.admission import Admission
from replica.arrival_queue import ArrivalQueue, WaitingQueue
from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.delivery import Delivery
from replica.device_link import DeviceLink, link_to
from replica.errors import EngineDead, ReplicaError
from replica.fair_queue import FairQueue
from replica.flight import Flight
from replica.live_requests import LiveRequests
from replica.mailbox import Mailbox, run_between_steps
from replica.messages import GenerateRequest
from replica.outbox import Outbox
from replica.sampler import Sampler
from replica.scheduler import Scheduler, Work
from replica.sequence import RequestGroup
from replica.step import StepModel, StepRunner
from replica.step_protocols import StepAdapters, StepObserver

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0
"""An idle loop looks at the adapters this often even if nobody wakes it."""


@dataclass(frozen=True, slots=True)
class TenantState:
    """One tenant's requests of which nothing has been computed, how long the oldest waits, and its deficit."""

    num_waiting: int = 0
    oldest_wait_s: float = 0.0
    deficit: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """A snapshot after some step; `num_waiting` counts requests of which nothing has been computed."""

    num_waiting: int = 0
    num_loading: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    num_found_tokens: int = 0


def make_queue(config: SchedulerConfig) -> WaitingQueue[RequestGroup]:
    """The admission policy that the configuration names."""
    return FairQueue(config.quantum_tokens) if config.policy == "drr" else ArrivalQueue()


class Engine:
    """Continuous batching on a thread of its own. The methods without underscore may be called from any thread."""

    def __init__(
        self,
        model: StepModel,
        adapters: StepAdapters,
        config: SchedulerConfig,
        observer: StepObserver,
        *,
        num_blocks: int,
        num_slots: int,
        on_fatal: Callable[[BaseException], None] | None = None,
        sampler: Sampler | None = None,
        link: DeviceLink | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_ended: OnEnded | None = None,
        on_preempted: OnPreempted | None = None,
    ) -> None:
        self._model = model
        self._link = link or link_to(model.device)
        self._runner = StepRunner(model, sampler or Sampler(), self._link)
        self._flight: Flight | None = None
        self._adapters = adapters
        self._observer = observer
        self._on_fatal = on_fatal
        self._clock = clock
        self._accounts = Accounts(on_ended, on_preempted)
        self._blocks = BlockManager(num_blocks, config.block_size)
        self._admission = Admission(
            make_queue(config),
            adapters,
            num_slots=num_slots,
            max_loading=config.max_num_seqs,
            patience_s=config.adapter_patience_s,
            tokens_per_s=self._accounts.tokens_per_s,
            clock=clock,
        )
        self._scheduler = Scheduler(config, self._admission, self._blocks)
        self._num_steps = 0
        self._read_at_s = clock()
        self.counts = EngineCounts(num_free_blocks=num_blocks)
        self._mailbox = Mailbox(clock)
        self._live = LiveRequests(self._mailbox.lock, config.max_waiting)
        self._delivery = Delivery(
            self._scheduler, self._live, model.eos_token_ids, observer.on_end, self._accounts, clock
        )
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def __repr__(self) -> str:
        return f"Engine({self._live}, steps={self._num_steps}, {self._scheduler})"

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerateRequest, outbox: Outbox) -> None:
        """Queue a request. Raises Overloaded, EngineDead, what `refuse` said; InvalidRequest for an id in use."""
        group = RequestGroup(request, outbox, self._clock(), context_length=self._model.context_length)
        with self._mailbox.lock:
            self._live.add(group)
            self._mailbox.post(partial(self._accept, group))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it; its chunks say "abort". An unknown or ended one is left alone."""
        with self._mailbox.lock:
            if self._live.get(request_id) is not None:
                self._mailbox.post(partial(self._delivery.abort, request_id, index))

    def abort_adapter(self, digest: str, error: ReplicaError) -> None:
        """End every request on that adapter, wherever it stands; each gets `error`."""
        with self._mailbox.lock:
            self._mailbox.post(partial(self._withdraw, digest, error))

    def adapters_in_use(self) -> frozenset[str]:
        """The digests that live requests want."""
        return frozenset(group.adapter for group in self._live.all() if group.adapter is not None)

    def tenants(self) -> dict[str, TenantState]:
        """How each tenant with waiting requests stands in the queue."""
        now_s, deficits = self._clock(), self._admission.deficits()
        return {
            tenant: TenantState(len(arrived_s), now_s - min(arrived_s), deficits.get(tenant, 0.0))
            for tenant, arrived_s in self._live.waiting_since().items()
        }

    def refuse(self, reason: ReplicaError) -> None:
        """Take no new requests from now on; those that are here go on."""
        self._live.refuse(reason)

    def wake(self) -> None:
        """Make an idle loop look again: an adapter's load has settled."""
        self._mailbox.wake()

    def abort_all(self) -> None:
        for group in self._live.all():
            self.abort(group.key)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no request is live, at most `timeout_s` seconds; whether that came to be."""
        return self._live.wait_idle(timeout_s)

    def is_alive(self, stall_s: float) -> bool:
        """Whether the loop runs and, if there is work, has ended a step within `stall_s` seconds."""
        return self._thread.is_alive() and not self._mailbox.is_stalled(stall_s)

    def check_integrity(self, also: Callable[[], None] | None = None, timeout_s: float = 30.0) -> None:
        """Assert, between two steps, that every lease belongs to a live request; then run `also` there.

        Raises AssertionError, and TimeoutError when no step ends within `timeout_s` seconds.
        """
        actions = [self._check_integrity] if also is None else [self._check_integrity, also]
        for action in actions:
            if self._thread.is_alive():
                run_between_steps(self._mailbox, action, timeout_s)
            else:
                action()

    def close(self) -> None:
        """Stop the loop; what still runs ends with an EngineDead chunk. Idempotent."""
        self.refuse(EngineDead("the replica is closed"))
        self._mailbox.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._mailbox.is_closed:
                    if not self._step():
                        self._mailbox.sleep(IDLE_CHECK_S)
            self._die(EngineDead("the replica is closed"))
        except BaseException as error:
            logger.exception("the step loop died")
            self._die(EngineDead(f"the step loop died: {type(error).__name__}: {error}"))
            if self._on_fatal is not None:
                self._on_fatal(error)

    def _step(self) -> bool:
        """One turn of the loop; False when it changed nothing, so that only a command or a load can."""
        for command in self._mailbox.take():
            command()
        self._adapters.poll()
        if self._must_read():
            self._read()
        works = self._scheduler.schedule()
        self._accounts.preempted(self._scheduler.take_preempted())
        self._delivery.fail(self._admission.take_failed())
        launched = self._launch(works) if works else None
        self._read()
        self._flight = launched
        if not self._link.is_asynchronous:
            self._read()
        self._count()
        moved = self._delivery.emit()
        self._accounts.report(self._flight)
        return moved or bool(works)

    def _must_read(self) -> bool:
        """Whether the next step cannot be planned or sampled before the tokens of the last one are known."""
        return self._flight is not None and (self._flight.holds_history or not self._scheduler.can_plan_ahead())

    def _launch(self, works: Items[Work]) -> Flight:
        now_s = self._clock()
        self._note_started(works, now_s)
        flight = self._runner.launch(works, self._flight, now_s)
        for work in works:
            self._scheduler.complete(work)
        return flight

    def _note_started(self, works: Items[Work], now_s: float) -> None:
        for group in (work.sequence.group for work in works):
            if self._live.start(group):
                group.started_s = now_s
                self._observer.on_start(group, now_s - group.arrived_at_s)

    def _read(self) -> None:
        """Wait for the step in flight, if there is one, and deliver what it gave."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        for sequence, chosen in flight.tokens():
            self._delivery.token(sequence, chosen)
        for sequence in flight.read_prompts():
            self._delivery.end(sequence, "length")
        self._num_steps += 1
        started_s, self._read_at_s = max(flight.launched_at_s, self._read_at_s), self._clock()
        self._observer.on_step(flight.batch, self._read_at_s - started_s)
        self._accounts.divide(flight, self._read_at_s - started_s, self._read_at_s)

    def _accept(self, group: RequestGroup) -> None:
        self._scheduler.add(group)
        if not group.request.sampling.max_tokens:
            for sequence in group.sequences:
                if sequence.prompt_logprobs is None:
                    self._delivery.end(sequence, "length")

    def _withdraw(self, digest: str, error: ReplicaError) -> None:
        self._delivery.fail((group, error) for group in self._live.all() if group.adapter == digest)
        self._observer.on_withdrawn(digest)

    def _count(self) -> None:
        self._mailbox.progress()
        self.counts = EngineCounts(
            num_waiting=self._live.num_waiting,
            num_loading=self._admission.num_loading,
            num_running=self._scheduler.num_running,
            num_free_blocks=self._blocks.num_free,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_pauses=self._scheduler.num_pauses,
            num_found_tokens=self._scheduler.num_found_tokens,
        )

    def _die(self, reason: EngineDead) -> None:
        """Refuse what comes and end what is here, even if the state it belongs to is broken."""
        self._live.refuse(reason, at_last=True)
        self._flight = None
        for group in self._live.all():
            for sequence in group.live():
                with suppress(Exception):
                    self._delivery.end(sequence, "error", error=reason)
            self._live.end(group)
        self._count()
        self._delivery.emit()
        self._accounts.report(None)

    @property
    def busy_s(self) -> float:
        """The time of all steps so far, which is what the requests' parts of it add up to."""
        return self._accounts.busy_ns / NS_PER_S

    def _check_integrity(self) -> None:
        self._read()
        self._scheduler.check_integrity()
        self._live.check_integrity()
        with self._mailbox.lock:
            if not len(self._live):
                assert self._blocks.num_free == self._blocks.num_blocks, f"nothing runs, yet {self._blocks}"
                num_kept = self._admission.num_waiting + self._admission.num_loading + self._admission.num_charged
                assert not num_kept, f"nothing is live, yet {self._admission}"
