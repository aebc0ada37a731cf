"""What becomes of choices: their tokens go out, and at the end all they hold comes back. Knows no tensors, no steps."""

from collections.abc import Callable, Iterable

from replica.accounts import Accounts, worse
from replica.errors import AdapterUnavailable, ReplicaError
from replica.live_requests import LiveRequests
from replica.messages import FinishReason, TokenChunk, TokenLogprob
from replica.outbox import Outgoing
from replica.sampler import Chosen
from replica.scheduler import Scheduler
from replica.sequence import RequestGroup, Sequence


class Delivery:
    """The only way by which tokens leave and choices end. Used by the step thread alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        live: LiveRequests,
        eos_token_ids: frozenset[int],
        on_end: Callable[[FinishReason], None],
        accounts: Accounts,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._eos_token_ids = eos_token_ids
        self._on_end = on_end
        self._accounts = accounts
        self._clock = clock
        self._outgoing = Outgoing()

    def emit(self) -> bool:
        """Hand out the chunks since the last call; False when there were none."""
        return self._outgoing.emit()

    def token(self, sequence: Sequence, chosen: Chosen) -> None:
        """The oldest token in flight of `sequence` is known."""
        if not chosen.is_finite:
            self.end(sequence, "error", error=_not_finite(sequence.group))
            return
        reason = sequence.land_token(chosen.token_id, self._eos_token_ids)
        self._scheduler.sampled(sequence)
        logprobs = () if chosen.logprob is None else (chosen.logprob,)
        if reason is None:
            self._send(sequence, (chosen.token_id,), logprobs)
        else:
            self.end(sequence, reason, (chosen.token_id,), logprobs)

    def abort(self, request_id: str, index: int | None) -> None:
        group = self._live.get(request_id)
        for sequence in () if group is None else group.live():
            if index is None or sequence.index == index:
                self.end(sequence, "abort")

    def fail(self, failed: Iterable[tuple[RequestGroup, Exception]]) -> None:
        for group, error in failed:
            for sequence in group.live():
                self.end(sequence, "error", error=error)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: Exception | None = None,
    ) -> None:
        """The one end of a choice: its last chunk goes out and all it holds comes back."""
        self._send(sequence, token_ids, logprobs, reason, error)
        self._scheduler.end(sequence, is_sound=reason != "error")
        self._on_end(reason)
        group = sequence.group
        group.outcome = worse(group.outcome, reason, error)
        if group.is_ended:
            self._live.end(group)
            self._accounts.end(group, self._clock())

    def _send(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None = None,
        error: Exception | None = None,
    ) -> None:
        group, prompt_logprobs = sequence.group, sequence.take_prompt_logprobs()
        chunk = TokenChunk(group.key, sequence.index, token_ids, logprobs, prompt_logprobs, reason, error)
        self._outgoing.add(group.outbox, chunk)


def _not_finite(group: RequestGroup) -> ReplicaError:
    if group.adapter is None:
        return ReplicaError("the base model gave logits that are not finite")
    return AdapterUnavailable(f"adapter {group.adapter} gave logits that are not finite")
