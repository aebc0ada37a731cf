"""Token ids to text while they arrive, never showing half a character.

A token's text depends on its neighbours (spaces, multi-byte characters), so ids are decoded in a short window. Text
that ends in U+FFFD may be the start of a character and waits for the next token.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_CHARS = 3
"""An unfinished UTF-8 character shows as one to three U+FFFD; any before those are final."""
KEPT_TOKENS = 6
MAX_WINDOW_TOKENS = 14


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """The text of one choice. `num_chars` counts what was given out; `push` costs one short decode."""

    __slots__ = ("_decode", "_num_sent", "_special_ids", "_window", "num_chars")

    def __init__(self, decoder: Decoder) -> None:
        self._decode = decoder.decode
        self._special_ids = decoder.special_ids
        self._window: list[int] = []
        self._num_sent = 0
        self.num_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain; special tokens have none."""
        window = self._window
        for token_id in token_ids:
            if token_id not in self._special_ids:
                window.append(token_id)
        text = self._decode(window)
        end = len(text)
        while end and text[end - 1] == REPLACEMENT and len(text) - end < MAX_HELD_CHARS:
            end -= 1
        delta = text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        self.num_chars += len(delta)
        if len(window) > MAX_WINDOW_TOKENS:
            self._shorten(len(text) - self._num_sent)
        return delta

    def flush(self) -> str:
        """What was held back, as it stands; the choice is over."""
        delta = self._decode(self._window)[self._num_sent :]
        self._num_sent += len(delta)
        self.num_chars += len(delta)
        return delta

    def _shorten(self, num_held: int) -> None:
        self._window = self._window[-KEPT_TOKENS:]
        self._num_sent = max(0, len(self._decode(self._window)) - num_held)
