"""A request inside the engine and its choices. Knows their progress, not who decides about it."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from replica.block_manager import BlockTable
from replica.messages import FinishReason, GenerateRequest, TokenLogprob
from replica.model.batch import LoraPair
from replica.outbox import Outbox
from replica.prefix_index import Key, extend_keys, root_key
from replica.sampler import Chooser

NO_SLOT = -1


class Lease(Protocol):
    """A pinned adapter slot, or the promise of one. `slot` and `pairs` mean something only when `ready`."""

    @property
    def ready(self) -> bool: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def pairs(self) -> Mapping[int, LoraPair]: ...
    def release(self) -> None: ...


class State(StrEnum):
    """`parked`: waits for a sibling to compute the prompt. `ready`: waits for KV blocks. `running`: in the batch."""

    PARKED = "parked"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """One choice of a request: its tokens, how many of them the KV cache holds, and its block table.

    A token is *in flight* from the launch of the step that samples it until the host has read it: it counts, and its
    value is known to the device alone. `num_computed` runs ahead in the same way: it counts what has been launched.
    """

    def __init__(self, group: "RequestGroup", index: int) -> None:
        request = group.request
        self.group = group
        self.index = index
        self.state = State.PARKED
        self.tokens = list(request.prompt)
        self.num_prompt = len(self.tokens)
        self.samples = request.sampling.max_tokens > 0
        """Whether it wants any token, and not just its prompt read."""
        self.max_length = min(self.num_prompt + request.sampling.max_tokens, group.context_length)
        self.num_computed = 0
        self.num_in_flight = 0
        self.flight_row = 0
        """Where the token in flight stands among those that its step samples."""
        self.num_scored = 1
        """Prompt tokens whose log-probabilities some step was asked for; the first one has none."""
        self.num_passed = 0
        """How many sequences got KV blocks before this one although it came first."""
        self.blocks: BlockTable = ()
        self.num_published = 0
        """How many of its blocks were offered to others."""
        self._keys: list[Key] = []
        self.chooser = Chooser.of(request.sampling, index)
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if index == 0 and request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def __repr__(self) -> str:
        computed = f"{self.num_computed}/{self.num_tokens}"
        return f"Sequence({self.group.request.request_id}[{self.index}], {self.state}, computed={computed})"

    @property
    def order(self) -> tuple[int, int]:
        """Earlier admitted comes first; among choices of one request the lower index."""
        return (self.group.order, self.index)

    @property
    def num_tokens(self) -> int:
        """Its length with the tokens in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens that are not yet in the KV cache."""
        return len(self.tokens) + self.num_in_flight - self.num_computed

    @property
    def is_full(self) -> bool:
        """Whether the token in flight is the last one there can be: nothing is left to launch."""
        return self.num_in_flight > 0 and len(self.tokens) + self.num_in_flight >= self.max_length

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def slot(self) -> int:
        lease = self.group.lease
        return NO_SLOT if lease is None or lease.slot is None else lease.slot

    def keys(self, num_blocks: int, block_size: int) -> list[Key]:
        """What its first `num_blocks` blocks hold; all their tokens must be known."""
        assert num_blocks * block_size <= len(self.tokens), f"{self} does not know {num_blocks} blocks of tokens"
        extend_keys(self._keys, self.group.prefix_root, self.tokens, block_size, num_blocks)
        return self._keys[:num_blocks]

    def launch_token(self, row: int) -> None:
        """Note that a step samples the next token, as its `row`-th."""
        self.num_in_flight += 1
        self.flight_row = row

    def land_token(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Add the oldest token in flight; the reason to finish, if it is the last one."""
        self.num_in_flight -= 1
        self.tokens.append(token_id)
        sampling = self.group.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    def take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """The prompt's log-probabilities, once they are all there, and only once."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) < self.num_prompt:
            return None
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return tuple(taken)


class RequestGroup:
    """A request with its choices, and what is held for it: one adapter lease and one charge for all of them."""

    def __init__(
        self,
        request: GenerateRequest,
        outbox: Outbox,
        arrived_at_s: float = 0.0,
        *,
        context_length: int = sys.maxsize,
    ) -> None:
        self.request = request
        self.context_length = context_length
        self.outbox = outbox
        self.arrived_at_s = arrived_at_s
        self.order = -1
        """Place in the order of admission; -1 until admitted."""
        self.is_started = False
        """Whether its adapter is in place and a choice computes, or waits for blocks."""
        self.lease: Lease | None = None
        sampling = request.sampling
        output = sampling.max_tokens if request.expected_tokens is None else request.expected_tokens
        self.output_cost = sampling.n * output
        self.cost = len(request.prompt) + self.output_cost
        self.num_load_tokens = 0
        """What its tenant was charged besides, for the adapter that came into a slot for it."""
        self.num_prompt_computed = 0
        """Prompt tokens that were computed or found; both are what the charge was for."""
        self.device_ns = 0
        self.num_preemptions = 0
        self.outcome = ""
        """What became of the choices that ended, see `replica.accounts`; empty until one has."""
        self.admitted_s: float | None = None
        self.ready_s: float | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.prefix_root = root_key(request.tenant, request.adapter)
        self.sequences = tuple(Sequence(self, index) for index in range(sampling.n))

    def __repr__(self) -> str:
        states = [str(sequence.state) for sequence in self.sequences]
        return f"RequestGroup({self.key}, tenant={self.tenant}, adapter={self.request.adapter}, {states})"

    @property
    def key(self) -> str:
        return self.request.request_id

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def weight(self) -> float:
        """Its tenant's weight here: a tenant that waits at several replicas has a part of it at each."""
        return self.request.weight / self.request.spread

    @property
    def adapter(self) -> str | None:
        return self.request.adapter

    @property
    def is_admitted(self) -> bool:
        return self.order >= 0

    @property
    def is_ended(self) -> bool:
        return all(sequence.state is State.ENDED for sequence in self.sequences)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, over all choices."""
        return sum(sequence.num_output for sequence in self.sequences)

    @property
    def num_unused(self) -> int:
        """Tokens that were charged and neither computed (prompt) nor sampled (output)."""
        return self.cost - self.num_prompt_computed - self.num_output

    @property
    def num_outstanding(self) -> int:
        """Output tokens that were charged and not sampled; below 0 when there were more than expected."""
        return self.output_cost - self.num_output

    def live(self, *states: State) -> list[Sequence]:
        """The choices in one of `states`, or all that have not ended."""
        wanted = states or (State.PARKED, State.READY, State.RUNNING)
        return [sequence for sequence in self.sequences if sequence.state in wanted]
