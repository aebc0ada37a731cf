"""One prompt of a call while it is served: its choices' deltas, its echo, and stopping what is complete."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from replica.messages import TokenChunk, TokenLogprob
from router.calls import Call, Prompt
from router.choice import Choice, Delta, TokenEntry
from router.detokenizer import Detokenizer
from router.dispatch import Dispatch, Interrupted, closing
from router.errors import ReplicaGone
from router.pace import Pace
from router.tokenizer import BaseTokenizer


class PromptRun:
    """Turns a dispatch's chunks into deltas whose indices are the call's."""

    def __init__(self, call: Call, prompt: Prompt, dispatch: Dispatch, pace: Pace) -> None:
        self._call = call
        self._prompt = prompt
        self._tokenizer = call.tokenizer
        self._dispatch = dispatch
        self._pace = pace
        self.was_answered = False
        """Whether a replica has sent something other than its refusal."""
        self._begin()

    def _begin(self) -> None:
        """Fresh choices, before the first message of an attempt."""
        prompt, call = self._prompt, self._call
        offset = len(prompt.echo or "")
        self.choices = [
            Choice(prompt.first_index + i, call.tokenizer, call.stops, offset) for i in range(prompt.sampling.n)
        ]
        self._num_open = len(self.choices)

    @property
    def replica_id(self) -> str | None:
        """The replica that serves it, or was the last to try."""
        return self._dispatch.replica_id

    @property
    def first_token_s(self) -> float | None:
        """When its first token came, by the clock of its pace."""
        return self._pace.first_s

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Deltas message by message, the first message always a list; or all at once when the answer is whole."""
        if not self._call.is_whole:
            async with aclosing(self._attempt()) as stream:
                async for deltas in stream:
                    yield deltas
        else:
            yield await self._whole()

    async def _whole(self) -> list[Delta]:
        """The deltas of the first attempt that came to its end; `Dispatch` says when there may be no more."""
        while True:
            whole: list[Delta] = []
            try:
                async with aclosing(self._attempt()) as stream:
                    async for deltas in stream:
                        whole += deltas
                return whole
            except Interrupted:
                self._begin()

    async def _attempt(self) -> AsyncGenerator[list[Delta], None]:
        backlog: list[TokenChunk] | None = []
        async with closing(self._dispatch.chunks()) as stream:
            async for chunks in stream:
                num_tokens = len(chunks[0].token_ids) if len(chunks) == 1 else _num_tokens(chunks)
                if num_tokens:
                    self._pace.arrived(num_tokens, self._num_open)
                self.was_answered = self.was_answered or num_tokens > 0 or any(map(_is_end, chunks))
                deltas: list[Delta] = []
                if backlog is not None:
                    backlog.extend(chunks)
                    if not self._can_begin(backlog):
                        continue
                    deltas, chunks, backlog = self._echo(backlog), backlog, None
                    await self._push(chunks, deltas)
                    yield deltas
                else:
                    await self._push(chunks, deltas)
                    if deltas:
                        yield deltas
                if not self._num_open:
                    return
        raise ReplicaGone("the replica ended the stream before the answer was complete")

    async def _push(self, chunks: Sequence[TokenChunk], deltas: list[Delta]) -> None:
        for chunk in chunks:
            choice = self.choices[chunk.index]
            if choice.finished:
                continue
            delta = choice.push(chunk)
            if delta is not None:
                deltas.append(delta)
            if choice.finished:
                self._num_open -= 1
                if chunk.finish_reason is None and self._num_open:
                    await self._dispatch.stop_choice(chunk.index)

    def _can_begin(self, chunks: Sequence[TokenChunk]) -> bool:
        """Whether the prompt's log-probabilities, if asked for, are here: they come before any choice's text."""
        wanted = self._prompt.sampling.prompt_logprobs is not None
        failed = any(chunk.finish_reason in ("error", "abort") for chunk in chunks)
        return not wanted or failed or any(chunk.prompt_logprobs is not None for chunk in chunks)

    def _echo(self, chunks: Sequence[TokenChunk]) -> list[Delta]:
        if self._prompt.echo is None:
            return []
        logprobs = next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None)
        echo, token_ids = self._prompt.echo, self._prompt.token_ids
        entries = () if logprobs is None else prompt_entries(self._tokenizer, echo, token_ids, logprobs)
        return [Delta(choice.index, echo, entries) for choice in self.choices]


def _num_tokens(chunks: Sequence[TokenChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _is_end(chunk: TokenChunk) -> bool:
    """Whether a choice has ended as it should, which it may without a token."""
    return chunk.finish_reason in ("stop", "length")


def prompt_entries(
    tokenizer: BaseTokenizer, echo: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> tuple[TokenEntry, ...]:
    """The prompt's tokens with their log-probabilities and the characters of `echo` at which they begin.

    A special token has the width that it takes in the echoed text: its own when the client wrote it, else none.
    """
    detokenizer = Detokenizer(tokenizer)
    entries, num_special_chars = [], 0
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        offset = detokenizer.num_chars + num_special_chars
        entries.append(TokenEntry(token_id, offset, logprob))
        detokenizer.push((token_id,))
        if token_id in tokenizer.special_ids and echo.startswith(tokenizer.token_text(token_id), offset):
            num_special_chars += len(tokenizer.token_text(token_id))
    return tuple(entries)
