"""One choice of an answer while it is generated: tokens in, certain text and its log-probabilities out."""

from collections.abc import Sequence
from dataclasses import dataclass

from replica.messages import FinishReason, TokenChunk, TokenLogprob
from router.detokenizer import Decoder, Detokenizer
from router.errors import RequestAborted
from router.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token for a logprobs list. `offset` is the character of the choice's text at which it begins.

    `logprob` is None for the first token of a prompt, which nothing predicts.
    """

    token_id: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain of one choice. The last delta of a choice has a finish reason."""

    index: int
    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None


class Choice:
    """Follows one choice to its end: the replica's finish, or a stop string in its text.

    `num_tokens` counts sampled tokens up to the end, those of the stop string included.
    """

    __slots__ = (
        "_base_offset",
        "_detokenizer",
        "_matcher",
        "_num_released",
        "_pending",
        "finished",
        "index",
        "num_tokens",
    )

    def __init__(self, index: int, decoder: Decoder, stops: Sequence[str] = (), base_offset: int = 0) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._base_offset = base_offset
        self._detokenizer = Detokenizer(decoder)
        self._matcher = StopMatcher(stops) if stops else None
        self._pending: list[TokenEntry] = []
        self._num_released = 0

    def push(self, chunk: TokenChunk) -> Delta | None:
        """The delta that `chunk` completes, if any; raises the chunk's error when it carries one."""
        assert not self.finished, "a chunk after the end"
        if chunk.finish_reason == "error" or chunk.finish_reason == "abort":
            raise chunk.error or RequestAborted("the replica ended this request early; it may be retried")
        is_plain = self._matcher is None and not chunk.logprobs
        text = self._push_plain(chunk) if is_plain else self._push_each(chunk)
        reason = self._finish_reason(chunk)
        self.finished = reason is not None
        if not text and reason is None:
            return None
        return Delta(self.index, text, self._release(text, reason), reason)

    def _push_plain(self, chunk: TokenChunk) -> str:
        self.num_tokens += len(chunk.token_ids)
        text = self._detokenizer.push(chunk.token_ids) if chunk.token_ids else ""
        return text if chunk.finish_reason is None else text + self._detokenizer.flush()

    def _push_each(self, chunk: TokenChunk) -> str:
        """Token by token, so that each has its offset and none is counted after a stop string."""
        text = ""
        for position, token_id in enumerate(chunk.token_ids):
            if chunk.logprobs:
                offset = self._base_offset + self._detokenizer.num_chars
                self._pending.append(TokenEntry(token_id, offset, chunk.logprobs[position]))
            self.num_tokens += 1
            text += self._match(self._detokenizer.push((token_id,)))
            if self._stopped:
                return text
        return text if chunk.finish_reason is None else text + self._flush()

    def _match(self, text: str) -> str:
        return text if self._matcher is None else self._matcher.push(text)

    def _flush(self) -> str:
        text = self._match(self._detokenizer.flush())
        return text if self._matcher is None or self._stopped else text + self._matcher.flush()

    @property
    def _stopped(self) -> bool:
        return self._matcher is not None and self._matcher.stopped

    def _finish_reason(self, chunk: TokenChunk) -> FinishReason | None:
        return "stop" if self._stopped else chunk.finish_reason

    def _release(self, text: str, reason: FinishReason | None) -> tuple[TokenEntry, ...]:
        """Entries of the tokens whose text is out; at a natural end all, at a stop string those before the cut."""
        self._num_released += len(text)
        if not self._pending:
            return ()
        limit = self._base_offset + self._num_released
        everything = reason is not None and not self._stopped
        count = sum(1 for entry in self._pending if everything or entry.offset < limit)
        released, self._pending = self._pending[:count], self._pending[count:]
        return tuple(released)
