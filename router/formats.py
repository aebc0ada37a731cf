"""Answers in OpenAI's two shapes: bytes of a stream, built from parts prepared once, and the whole object.

The stream path runs once a token and choice: it escapes the new text and joins bytes, nothing more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from replica.messages import FinishReason
from router.calls import Call
from router.choice import Delta, TokenEntry
from router.logprobs import chat_logprobs, completion_logprobs
from router.sse import DONE, event, to_json

ENDS: dict[FinishReason | None, bytes] = {
    None: b',"finish_reason":null}',
    "stop": b',"finish_reason":"stop"}',
    "length": b',"finish_reason":"length"}',
}


@dataclass(slots=True)
class FullChoice:
    """A finished choice, put together from its deltas."""

    texts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.entries.extend(delta.entries)
        self.finish_reason = delta.finish_reason or self.finish_reason


def usage_of(call: Call, num_completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object; each prompt counts once, however many choices it has."""
    return {
        "prompt_tokens": call.num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": call.num_prompt_tokens + num_completion_tokens,
    }


class Format(Protocol):
    """One endpoint's shape. A format serves one call."""

    def first(self) -> bytes: ...

    def chunk(self, delta: Delta) -> bytes: ...

    def last(self, num_completion_tokens: int) -> bytes: ...

    def full(self, choices: Sequence[FullChoice], num_completion_tokens: int) -> dict[str, Any]: ...


class _Shape:
    """The parts of every chunk that do not change during a call."""

    def __init__(self, call: Call, stream_object: str, full_object: str) -> None:
        self._call = call
        self._full_object = full_object
        self._head = {"id": call.call_id, "object": stream_object, "created": call.created_s, "model": call.model}
        self._head["system_fingerprint"] = call.fingerprint
        opening = to_json(self._head)[:-1]
        self._prefix = b"data: " + opening + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    def _wrap(self, choice: bytes) -> bytes:
        return self._prefix + choice + self._suffix

    def last(self, num_completion_tokens: int) -> bytes:
        """The end of the stream, after the usage chunk when the client wants one."""
        if not self._call.include_usage:
            return DONE
        return event(self._head | {"choices": [], "usage": usage_of(self._call, num_completion_tokens)}) + DONE

    def _whole(self, choices: list[dict[str, Any]], num_completion_tokens: int) -> dict[str, Any]:
        usage = usage_of(self._call, num_completion_tokens)
        return self._head | {"object": self._full_object, "choices": choices, "usage": usage}


class ChatFormat(_Shape):
    """`chat.completion` and its chunks."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, "chat.completion.chunk", "chat.completion")
        self._openings = [b'{"index":%d,"delta":{"content":' % i for i in range(call.num_choices)]

    def first(self) -> bytes:
        """One chunk a choice that names the speaker."""
        return b"".join(
            self._wrap(
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % i
            )
            for i in range(self._call.num_choices)
        )

    def chunk(self, delta: Delta) -> bytes:
        """One choice's news."""
        text = encode_basestring_ascii(delta.text).encode()
        logprobs = b'},"logprobs":null'
        if delta.entries:
            logprobs = b'},"logprobs":' + to_json(chat_logprobs(self._call.tokenizer, delta.entries))
        return self._wrap(self._openings[delta.index] + text + logprobs + ENDS[delta.finish_reason])

    def full(self, choices: Sequence[FullChoice], num_completion_tokens: int) -> dict[str, Any]:
        return self._whole([self._choice(i, choice) for i, choice in enumerate(choices)], num_completion_tokens)

    def _choice(self, index: int, choice: FullChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": chat_logprobs(self._call.tokenizer, choice.entries) if self._call.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }


class CompletionFormat(_Shape):
    """`text_completion`, whole and in chunks."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, "text_completion", "text_completion")
        self._openings = [b'{"index":%d,"text":' % i for i in range(call.num_choices)]
        self._num_top = call.prompts[0].sampling.logprobs or 0

    def first(self) -> bytes:
        """Completions begin with text at once."""
        return b""

    def chunk(self, delta: Delta) -> bytes:
        """One choice's news."""
        text = encode_basestring_ascii(delta.text).encode()
        logprobs = b',"logprobs":null'
        if delta.entries:
            logprobs = b',"logprobs":' + to_json(self._logprobs(delta.entries))
        return self._wrap(self._openings[delta.index] + text + logprobs + ENDS[delta.finish_reason])

    def full(self, choices: Sequence[FullChoice], num_completion_tokens: int) -> dict[str, Any]:
        return self._whole([self._choice(i, choice) for i, choice in enumerate(choices)], num_completion_tokens)

    def _choice(self, index: int, choice: FullChoice) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": self._logprobs(choice.entries) if self._call.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return completion_logprobs(self._call.tokenizer, entries, self._num_top)
