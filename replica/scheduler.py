"""What the next step computes: continuous batching under a token budget, with KV blocks given and taken back.

Knows sequences, blocks and their order, not tensors, logits or outboxes. Preemption is by recompute: among those whose
tenant holds more than its share, the sequence admitted last gives up its blocks, keeps its tokens and comes back
first. A row of the batch is taken back more cheaply: its sequence pauses and keeps its blocks. The oldest sequence is
never a victim, so somebody always gets to the end. Plans count tokens that are in flight as if they were known; only
whoever is preempted must have none (`can_plan_ahead` tells beforehand).

What a sequence gives back may still be in use by a step that was launched before: its next owner uses it in later
steps only, which the device runs afterwards. A copy into a freed adapter slot waits for what was launched so far.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter

from replica.admission import Admission
from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.sequence import RequestGroup, Sequence, State
from replica.shares import Shares, divide

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
        self._is_fair = config.policy == "drr"
        self._claimable_blocks = config.kv_share * blocks.num_blocks
        self._keeps_prefixes = config.prefix_cache
        self._ready: list[Sequence] = []
        self._running: list[Sequence] = []
        self._stalled: set[Sequence] = set()
        """Running sequences without a block for their next token, since nobody may be preempted for them."""
        self._waits_for_victim = False
        """Whether somebody has a claim on blocks of a sequence whose last token was in flight."""
        self.num_preemptions = 0
        self._preempted: list[tuple[Sequence, int]] = []
        self.num_pauses = 0
        self.num_found_tokens = 0
        """Tokens whose KV was found and not computed."""

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
        num_preemptions, self._waits_for_victim = self.num_preemptions, False
        self._stalled.clear()
        for sequence in self._growing():
            if sequence.state is State.RUNNING:
                self._grow(sequence)
        self._admit(is_calm=self.num_preemptions == num_preemptions or not self._running)
        works = self._fill_budget()
        if self._stalled and not works:
            for victim in self._victims()[-1:]:
                self._preempt(victim)
            return self.schedule()
        return works

    def take_preempted(self) -> list[tuple[Sequence, int]]:
        """Who was preempted since the last call, each with the tokens that it had computed and computes again."""
        taken, self._preempted = self._preempted, []
        return taken

    def can_plan_ahead(self) -> bool:
        """Whether `schedule` would preempt nobody, so that it need not know the tokens in flight."""
        num_missing = sum(self._num_missing(sequence) for sequence in self._growing())
        return not self._waits_for_victim and self._blocks.can_allocate(num_missing)

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
            elif num_pending and not sequence.is_full and sequence not in self._stalled:
                works.append(Work(sequence, 1, is_last=True))
        return works + self._chunks(long, self._max_batch_tokens - len(works))

    def _chunks(self, sequences: Items[Sequence], budget: int) -> list[Work]:
        """Prompt tokens: the budget is divided among tenants, and a tenant's part goes to its sequences in order."""
        if not sequences:
            return []
        shares, wants = self._shares(sequences), Counter[str]()
        for sequence in sequences:
            wants[shares.owner_of(sequence)] += sequence.num_pending
        parts = divide(budget, wants, shares.weights)
        works = []
        for sequence in sequences:
            owner = shares.owner_of(sequence)
            num_tokens = min(parts[owner], sequence.num_pending)
            if num_tokens:
                works.append(Work(sequence, num_tokens, is_last=num_tokens == sequence.num_pending))
                parts[owner] -= num_tokens
        return works

    def complete(self, work: Work) -> None:
        """Note that `work` has been launched; when that was a prompt's end, its other choices can start."""
        sequence, group = work.sequence, work.sequence.group
        was_in_prompt = sequence.num_computed < sequence.num_prompt
        sequence.num_computed += work.num_tokens
        self._publish(sequence)
        if was_in_prompt:
            group.num_prompt_computed = max(group.num_prompt_computed, min(sequence.num_computed, sequence.num_prompt))
        if was_in_prompt and sequence.num_computed >= sequence.num_prompt:
            for sibling in group.live(State.PARKED):
                self._fork(sequence, sibling)

    def sampled(self, sequence: Sequence) -> None:
        """A token of `sequence` that was in flight is known."""
        self._admission.sampled(sequence.group)

    def end(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Release what `sequence` holds, and what its request holds when it was the last choice. Idempotent.

        What one that is not sound has computed is found by nobody.
        """
        if sequence.state is State.ENDED:
            return
        if not is_sound:
            self._blocks.forget(sequence.blocks)
            sequence.num_published = len(sequence.blocks)
        self._withdraw(sequence)
        sequence.state = State.ENDED
        if sequence.group.is_ended:
            self._admission.release(sequence.group)
        elif sequence.group.is_started:
            self._start(sequence.group)

    def _shares(self, sequences: Items[Sequence] | None = None, joining: RequestGroup | None = None) -> Shares:
        return Shares(
            (*self._running, *self._ready) if sequences is None else sequences,
            num_rows=self._max_running,
            num_blocks=self._claimable_blocks,
            by_tenant=self._is_fair,
            joining=joining,
        )

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence the block its next token needs, from a victim if none is free."""
        num_missing = self._num_missing(sequence)
        while not self._blocks.can_allocate(num_missing):
            victim = self._victim_of(sequence, num_missing)
            if victim is None:
                self._stalled.add(sequence)
                return
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.blocks += self._blocks.allocate(num_missing)

    def _victim_of(self, sequence: Sequence, num_missing: int) -> Sequence | None:
        """Of the tenant that is most over its share, the sequence admitted last; None when that would be nobody.

        A tenant that asks beyond its share is over it, and may have to take from itself; one within its share does so
        when nobody else can give.
        """
        shares = self._shares()
        asker = shares.owner_of(sequence)
        asked = {asker: num_missing}
        mine = [each for each in self._victims() if shares.owner_of(each) == asker]
        over = [
            each
            for each in self._victims()
            if not shares.may_have_blocks(owner := shares.owner_of(each), asked.get(owner, 0))
        ]
        worst = lambda each: (shares.block_excess(shares.owner_of(each)), each.order)  # noqa: E731
        return max(over or mine, key=worst, default=None)

    def _victims(self) -> list[Sequence]:
        """Who may be preempted: any holder but the oldest."""
        return sorted(self._holders(), key=_by_order)[1:]

    def _num_missing(self, sequence: Sequence) -> int:
        return self._blocks.blocks_for(sequence.num_tokens) - len(sequence.blocks)

    def _holders(self) -> list[Sequence]:
        return [sequence for sequence in (*self._running, *self._ready) if sequence.blocks]

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight, f"{sequence} is preempted although its last token is not known"
        self._preempted.append((sequence, sequence.num_computed))
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
        self._publish(sequence)
        blocks, sequence.blocks, sequence.num_computed, sequence.num_published = sequence.blocks, (), 0, 0
        self._blocks.release(blocks)

    def _publish(self, sequence: Sequence) -> None:
        """Let later sequences find the full blocks whose tokens are known; their steps run after those launched."""
        if not self._keeps_prefixes:
            return
        size, first = self._blocks.block_size, sequence.num_published
        last = min(sequence.num_computed, len(sequence.tokens)) // size
        if last > first:
            for block, key in zip(sequence.blocks[first:last], sequence.keys(last, size)[first:], strict=True):
                self._blocks.publish(block, key)
            sequence.num_published = last

    def _find(self, sequence: Sequence) -> None:
        """Take over what is known of a sequence that holds nothing; its last token must be computed."""
        if not self._keeps_prefixes or sequence.blocks or sequence.prompt_logprobs is not None:
            return
        size = self._blocks.block_size
        sequence.blocks = self._blocks.find(sequence.keys((len(sequence.tokens) - 1) // size, size))
        sequence.num_published = len(sequence.blocks)
        sequence.num_computed = sequence.num_published * size
        self.num_found_tokens += sequence.num_computed

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

    def _admit(self, is_calm: bool) -> None:
        """Place who is ready and admit who may; unless `is_calm`, only those with a claim to what others hold."""
        for loaded in self._admission.loaded():
            self._start(loaded)
        self._place_ready(is_calm)
        while is_calm and self._has_room() and (group := self._admission.next()) is not None:
            self._start(group)
            self._place_ready(is_calm)
        while self._is_fair and self._admission.num_waiting and (group := self._admission.next_claimed(self._claims)):
            self._start(group)
            self._place_ready(is_calm)

    def _has_room(self) -> bool:
        return self.num_ready < MAX_READY and self._num_computing + self.num_ready < self._max_running

    def _has_row(self) -> bool:
        return self._num_computing < self._max_running

    def _claims(self, group: RequestGroup) -> bool:
        """Whether a tenant with nothing in line is within its share of rows and blocks with `group`."""
        if any(sequence.group.tenant == group.tenant for sequence in self._ready):
            return False
        shares, num_missing = self._shares(joining=group), self._blocks.blocks_for(len(group.request.prompt))
        has_blocks = shares.may_have_blocks(group.tenant, num_missing)
        return has_blocks and (self._has_row() or self._row_to_take(shares, group.tenant) is not None)

    def _place_ready(self, is_calm: bool) -> None:
        """Give rows and KV blocks to ready sequences in their order; one that needs too many may be passed a few times.

        After that, and for a start unless `is_calm`, only those are placed that have a claim: their tenant has nobody
        in line before them, and stays within its share.
        """
        passed: list[Sequence] = []
        is_open, waiting = is_calm, set[str]()
        for sequence in tuple(self._ready):
            if sequence.group.tenant not in waiting and self._claim(sequence):
                self._place(sequence)
            elif is_open and self._has_row() and self._can_place(sequence):
                self._place(sequence)
                for earlier in passed:
                    earlier.num_passed += 1
            elif self._is_held_up(sequence):
                break
            else:
                is_open = is_open and sequence.num_passed < MAX_PASSED
                waiting.add(sequence.group.tenant)
                passed.append(sequence)

    def _is_held_up(self, sequence: Sequence) -> bool:
        """Whether the oldest of all lacks blocks: then nobody is placed before it."""
        is_oldest = all(sequence.order <= each.order for each in (*self._running, *self._ready))
        return is_oldest and not self._can_place(sequence)

    def _can_place(self, sequence: Sequence) -> bool:
        """A newcomer leaves a block for every second running sequence, lest it be preempted at once.

        When nothing runs the first one can: blocks that others hold, who are ready too, are taken back.
        """
        if not self._running:
            return True
        return self._blocks.can_allocate(self._num_missing(sequence) + self.num_running // 2)

    def _claim(self, sequence: Sequence) -> bool:
        """Take back, from tenants over their share, what one within its share lacks; False when it has no claim."""
        if not self._is_fair or not self._running:
            return False
        shares, owner, num_missing = self._shares(), sequence.group.tenant, self._num_missing(sequence)
        lacks_row = not self._has_row()
        if len(shares.weights) < 2 or not shares.may_have_blocks(owner, num_missing):
            return False
        if lacks_row and self._row_to_take(shares, owner) is None:
            return False
        if not self._blocks.can_allocate(num_missing) and not self._take_blocks(owner, num_missing):
            return False
        victim = None if self._has_row() else self._row_to_take(self._shares(), owner)
        if victim is not None:
            self._pause(victim)
        return self._has_row()

    def _row_to_take(self, shares: Shares, owner: str) -> Sequence | None:
        """Of the tenant that is most over its share of rows, the running sequence admitted last."""
        if not shares.may_have_row(owner):
            return None
        rows = [each for each in self._running[1:] if not each.is_full]
        spare = [each for each in rows if shares.has_row_to_spare(shares.owner_of(each))]
        return max(spare, key=lambda each: (shares.row_excess(shares.owner_of(each)), each.order), default=None)

    def _take_blocks(self, owner: str, num_missing: int) -> bool:
        """Preempt sequences of tenants over their share until `num_missing` blocks are free; False when they won't."""
        while not self._blocks.can_allocate(num_missing):
            shares = self._shares()
            over = [each for each in self._victims() if not shares.may_have_blocks(shares.owner_of(each), 0)]
            over = [each for each in over if shares.owner_of(each) != owner]
            self._waits_for_victim = any(each.num_in_flight for each in over)
            if self._waits_for_victim or self._blocks.num_free + sum(len(each.blocks) for each in over) < num_missing:
                return False
            self._preempt(max(over, key=lambda each: (shares.block_excess(shares.owner_of(each)), each.order)))
        return True

    def _pause(self, sequence: Sequence) -> None:
        """Take a row and leave the blocks; a token in flight lands all the same."""
        self._running.remove(sequence)
        self._make_ready(sequence)
        self.num_pauses += 1

    def _place(self, sequence: Sequence) -> None:
        while not self._blocks.can_allocate(self._num_missing(sequence)):
            self._preempt(max((each for each in self._holders() if each is not sequence), key=_by_order))
        self._ready.remove(sequence)
        num_missing = self._num_missing(sequence)
        self._find(sequence)
        sequence.blocks += self._blocks.allocate(min(num_missing, self._num_missing(sequence)))
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
