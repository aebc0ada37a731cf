"""What the next step computes: continuous batching under a token budget, with KV blocks given and taken back.

Knows sequences, blocks and their order, not tensors, logits or outboxes. Preemption is by recompute: the sequence
admitted last gives up its blocks, keeps its tokens and comes back first. Plans count tokens that are in flight as if
they were known; only whoever is preempted must have none (`can_grow` tells beforehand).

What a sequence gives back may still be in use by a step that was launched before: its next owner uses it in later
steps only, which the device runs afterwards. A copy into a freed adapter slot waits for what was launched so far.
"""

from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter

from replica.admission import Admission
from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.sequence import RequestGroup, Sequence, State

MAX_READY = 8
"""Admitted sequences that may wait for KV blocks before nobody else is admitted: the rest keeps its fair order."""

MAX_PASSED = 16
"""How many later sequences may get KV blocks ahead of one that needs more than there are."""

_by_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `num_tokens` pending tokens of `sequence` in this step.

    `is_last` says that nothing stays pending, so that the last row's logits give the next token.
    """

    sequence: Sequence
    num_tokens: int
    is_last: bool


class Scheduler:
    """Sequences from admission to their end. `ready` wait for KV blocks, `running` hold theirs and compute."""

    def __init__(self, config: SchedulerConfig, admission: Admission, blocks: BlockManager) -> None:
        self._max_batch_tokens = config.max_batch_tokens
        self._max_running = min(config.max_num_seqs, config.max_batch_tokens)
        self._admission = admission
        self._blocks = blocks
        self._ready: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    def __repr__(self) -> str:
        return f"Scheduler(running={self.num_running}, ready={self.num_ready}, {self._admission}, {self._blocks})"

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _num_computing(self) -> int:
        """The running sequences that can be in the next batch."""
        return sum(not sequence.is_full for sequence in self._running)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def add(self, group: RequestGroup) -> None:
        self._admission.push(group)

    def schedule(self) -> list[Work]:
        """Plan one step: a token for each decoding sequence, then prompt chunks, within `max_batch_tokens`."""
        num_preemptions = self.num_preemptions
        for sequence in self._growing():
            if sequence.state is State.RUNNING:
                self._grow(sequence)
        if self.num_preemptions == num_preemptions or not self._running:
            self._admit()
        return self._fill_budget()

    def can_grow(self) -> bool:
        """Whether `schedule` would find a block for each running sequence's next token without preempting any."""
        return self._blocks.can_allocate(sum(self._num_missing(sequence) for sequence in self._growing()))

    def _growing(self) -> list[Sequence]:
        """The running sequences whose next token needs another block."""
        size = self._blocks.block_size
        return [each for each in self._running if each.num_tokens > len(each.blocks) * size and not each.is_full]

    def _fill_budget(self) -> list[Work]:
        works, long = [], []
        for sequence in self._running:
            num_pending = sequence.num_pending
            if num_pending > 1:
                long.append(sequence)
            elif num_pending and not sequence.is_full:
                works.append(Work(sequence, 1, is_last=True))
        return works + self._chunks(long, self._max_batch_tokens - len(works))

    def _chunks(self, sequences: Items[Sequence], budget: int) -> list[Work]:
        works = []
        for sequence in sequences:
            if budget > 0:
                num_tokens = min(budget, sequence.num_pending)
                works.append(Work(sequence, num_tokens, is_last=num_tokens == sequence.num_pending))
                budget -= num_tokens
        return works

    def complete(self, work: Work) -> None:
        """Note that `work` has been launched; when that was a prompt's end, its other choices can start."""
        sequence, group = work.sequence, work.sequence.group
        was_in_prompt = sequence.num_computed < sequence.num_prompt
        sequence.num_computed += work.num_tokens
        if was_in_prompt:
            group.num_prompt_computed = max(group.num_prompt_computed, min(sequence.num_computed, sequence.num_prompt))
        if was_in_prompt and sequence.num_computed >= sequence.num_prompt:
            for sibling in group.live(State.PARKED):
                self._fork(sequence, sibling)

    def end(self, sequence: Sequence) -> None:
        """Release what `sequence` holds, and what its request holds when it was the last choice. Idempotent."""
        if sequence.state is State.ENDED:
            return
        self._withdraw(sequence)
        sequence.state = State.ENDED
        if sequence.group.is_ended:
            self._admission.release(sequence.group)
        elif sequence.group.is_started:
            self._start(sequence.group)

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence the block its next token needs, from later sequences if none is free."""
        num_missing = self._num_missing(sequence)
        while not self._blocks.can_allocate(num_missing):
            victim = max(self._holders(), key=_by_order)
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.blocks += self._blocks.allocate(num_missing)

    def _num_missing(self, sequence: Sequence) -> int:
        return self._blocks.blocks_for(sequence.num_tokens) - len(sequence.blocks)

    def _holders(self) -> list[Sequence]:
        return [sequence for sequence in (*self._running, *self._ready) if sequence.blocks]

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight, f"{sequence} is preempted although its last token is not known"
        self._withdraw(sequence)
        sequence.num_passed = MAX_PASSED
        self._make_ready(sequence)
        self.num_preemptions += 1

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of its list and its blocks from it; what it had computed is lost."""
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is State.READY:
            self._ready.remove(sequence)
        blocks, sequence.blocks, sequence.num_computed = sequence.blocks, (), 0
        self._blocks.release(blocks)

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.state = State.READY
        insort(self._ready, sequence, key=_by_order)

    def _start(self, group: RequestGroup) -> None:
        """Let the first choice compute the prompt, unless one does already; the others stay parked until then."""
        group.is_started = True
        if not group.live(State.READY, State.RUNNING):
            self._make_ready(group.live(State.PARKED)[0])

    def _fork(self, source: Sequence, sibling: Sequence) -> None:
        """Share the prompt's full blocks; the sibling computes the rest, at least the last token, into its own."""
        num_shared = (source.num_prompt - 1) // self._blocks.block_size
        sibling.blocks = self._blocks.share(source.blocks[:num_shared])
        sibling.num_computed = num_shared * self._blocks.block_size
        self._make_ready(sibling)

    def _admit(self) -> None:
        for loaded in self._admission.loaded():
            self._start(loaded)
        self._place_ready()
        while self._has_room() and (group := self._admission.next()) is not None:
            self._start(group)
            self._place_ready()

    def _has_room(self) -> bool:
        return self.num_ready < MAX_READY and self._num_computing + self.num_ready < self._max_running

    def _place_ready(self) -> None:
        """Give KV blocks to ready sequences in their order; one that needs too many may be passed a few times."""
        passed: list[Sequence] = []
        for sequence in tuple(self._ready):
            if self._num_computing >= self._max_running:
                break
            if self._can_place(sequence):
                self._place(sequence)
                for earlier in passed:
                    earlier.num_passed += 1
            elif sequence.num_passed >= MAX_PASSED:
                break
            else:
                passed.append(sequence)

    def _can_place(self, sequence: Sequence) -> bool:
        """A newcomer leaves a block for every second running sequence, lest it be preempted at once.

        When nothing runs the first one can: blocks that others hold, who are ready too, are taken back.
        """
        if not self._running:
            return True
        return self._blocks.can_allocate(self._num_missing(sequence) + self.num_running // 2)

    def _place(self, sequence: Sequence) -> None:
        while not self._blocks.can_allocate(self._num_missing(sequence)):
            self._preempt(max((each for each in self._holders() if each is not sequence), key=_by_order))
        self._ready.remove(sequence)
        sequence.blocks += self._blocks.allocate(self._num_missing(sequence))
        sequence.num_passed = 0
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=_by_order)

    def check_integrity(self) -> None:
        """Assert that blocks and slot pins are exactly those of the sequences here."""
        held = (*self._running, *self._ready)
        self._blocks.check_integrity(sequence.blocks for sequence in held)
        assert all(sequence.state is State.RUNNING for sequence in self._running)
        assert all(sequence.state is State.READY for sequence in self._ready)
        for sequence in self._running:
            assert len(sequence.blocks) * self._blocks.block_size >= sequence.num_computed, f"{sequence} lacks blocks"
        self._admission.check_integrity({sequence.group.key: sequence.group for sequence in held}.values())
