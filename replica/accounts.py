"""What each request took of the device's time, and the report of those that ended. Knows no logs, traces or bills.

A step's time is divided among the choices of its batch by the tokens that each of them computed in it, in whole
nanoseconds; what the division leaves over goes to the first of them. So the parts add up to the step's time exactly,
and those of all requests to the time of all steps. A request is reported once no step that was launched for it is
unread: a choice that ends early still pays for the token that was under way behind its last one.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from replica.flight import Flight
from replica.messages import FinishReason, GenerateRequest
from replica.sequence import RequestGroup, Sequence

logger = logging.getLogger(__name__)
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request that ended. Times are by the engine's clock, in seconds; None for what it did not come to.

    `outcome` is an error's code, `abort` (who sent it gave it up, or cut it off), `stop` or `length`. `num_prompt` are
    the prompt tokens that were computed or found, `num_output` those sampled, over all choices.
    """

    request: GenerateRequest
    outcome: str
    num_prompt: int
    num_output: int
    device_ns: int
    arrived_s: float
    admitted_s: float | None
    """When its turn had come."""
    ready_s: float | None
    """When its adapter was in a slot."""
    started_s: float | None
    """The launch of its first step."""
    first_token_s: float | None
    ended_s: float
    num_preemptions: int = 0
    """How often a choice lost its KV blocks and computed anew."""

    @property
    def load_s(self) -> float:
        """How long it waited for its adapter after its turn had come."""
        return 0.0 if self.admitted_s is None else _or(self.ready_s, self.ended_s) - self.admitted_s

    @property
    def queue_s(self) -> float:
        """How long it waited otherwise, until its first step."""
        return _or(self.started_s, self.ended_s) - self.arrived_s - self.load_s


@dataclass(frozen=True, slots=True)
class Preemption:
    """A choice that lost its KV blocks to others: `num_tokens` of it are computed again."""

    request: GenerateRequest
    index: int
    num_tokens: int


OnEnded = Callable[[Items[RequestReport]], None]
OnPreempted = Callable[[Items[Preemption]], None]
"""Both are called from the step thread, at most once a step; they must not block."""


class Accounts:
    """Used by the step thread alone. `busy_ns` is the time of all steps so far, `num_tokens` what they computed."""

    def __init__(self, on_ended: OnEnded | None = None, on_preempted: OnPreempted | None = None) -> None:
        self._on_ended = on_ended
        self._on_preempted = on_preempted
        self._ended: list[tuple[RequestGroup, float]] = []
        self.busy_ns = 0
        self.num_tokens = 0

    def __repr__(self) -> str:
        return f"Accounts(busy={self.busy_ns} ns, unreported={len(self._ended)})"

    def divide(self, flight: Flight, took_s: float, now_s: float) -> None:
        """Charge a step that was read at `now_s` to the requests in it."""
        took_ns, num_tokens = round(took_s * NS_PER_S), sum(work.num_tokens for work in flight.works)
        a_token_ns, rest_ns = divmod(took_ns, num_tokens)
        flight.works[0].sequence.group.device_ns += rest_ns
        for work in flight.works:
            group = work.sequence.group
            group.device_ns += a_token_ns * work.num_tokens
            if group.first_token_s is None and work.is_last:
                group.first_token_s = now_s
        self.busy_ns += took_ns
        self.num_tokens += num_tokens

    def tokens_per_s(self) -> float:
        """Tokens, prompts' and sampled, in a second of the steps so far; 0 before the first."""
        return NS_PER_S * self.num_tokens / self.busy_ns if self.busy_ns else 0.0

    def preempted(self, victims: Items[tuple[Sequence, int]]) -> None:
        """Tell of choices that were preempted, each with the tokens that it had computed."""
        for sequence, _ in victims:
            sequence.group.num_preemptions += 1
        if victims and self._on_preempted is not None:
            told = [Preemption(each.group.request, each.index, num_tokens) for each, num_tokens in victims]
            try:
                self._on_preempted(told)
            except Exception:
                logger.exception("the news of %d preemptions was refused", len(told))

    def end(self, group: RequestGroup, now_s: float) -> None:
        """Note that the last choice of a request has ended."""
        if self._on_ended is not None:
            self._ended.append((group, now_s))

    def report(self, unread: Flight | None) -> None:
        """Tell of the requests that ended, but for those that the `unread` step was launched for."""
        if not self._ended or self._on_ended is None:
            return
        held = set() if unread is None else {work.sequence.group.key for work in unread.works}
        due = [report_of(group, now_s) for group, now_s in self._ended if group.key not in held]
        self._ended = [(group, now_s) for group, now_s in self._ended if group.key in held]
        if due:
            try:
                self._on_ended(due)
            except Exception:
                logger.exception("the reports of %d requests were refused", len(due))


def worse(outcome: str, reason: FinishReason, error: Exception | None) -> str:
    """The outcome of a request, one more of whose choices has ended: the first error, else `abort`, else the last."""
    if outcome not in ("", "stop", "length", "abort"):
        return outcome
    if reason == "error":
        return str(getattr(error, "code", "internal_error"))
    return "abort" if "abort" in (outcome, reason) else reason


def report_of(group: RequestGroup, ended_s: float) -> RequestReport:
    return RequestReport(
        request=group.request,
        outcome=group.outcome,
        num_prompt=group.num_prompt_computed,
        num_output=group.num_output,
        device_ns=group.device_ns,
        arrived_s=group.arrived_at_s,
        admitted_s=group.admitted_s,
        ready_s=group.ready_s,
        started_s=group.started_s,
        first_token_s=group.first_token_s,
        ended_s=ended_s,
        num_preemptions=group.num_preemptions,
    )


def _or(at_s: float | None, else_s: float) -> float:
    return else_s if at_s is None else at_s
