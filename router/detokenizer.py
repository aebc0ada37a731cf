"""Token ids to text while they arrive, never showing half a character.

A token's text depends on its neighbours (spaces, multi-byte characters), so ids are decoded in a short window. Text
that ends in U+FFFD may be the start of a character and waits for the next token.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 3
"""The longest unfinished UTF-8 character: so many bytes, and so many byte tokens."""
KEPT_TOKENS = 6
MAX_WINDOW_TOKENS = 48


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """The text of one choice. `num_chars` counts what was given out; `push` costs one short decode.

    The window begins at the start of a character, else bytes of half a character would spoil those that follow.
    """

    __slots__ = ("_clean_end", "_decode", "_num_sent", "_special_ids", "_window", "num_chars")

    def __init__(self, decoder: Decoder) -> None:
        self._decode = decoder.decode
        self._special_ids = decoder.special_ids
        self._window: list[int] = []
        self._clean_end = 0
        self._num_sent = 0
        self.num_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain; special tokens have none."""
        window = self._window
        for token_id in token_ids:
            if token_id not in self._special_ids:
                window.append(token_id)
        certain, num_clean = self._certain()
        delta = certain[self._num_sent :]
        self._num_sent += len(delta)
        self.num_chars += len(delta)
        if num_clean - self._clean_end >= KEPT_TOKENS:
            self._forget(self._clean_end, num_clean, 0)
        elif not num_clean and len(window) > MAX_WINDOW_TOKENS:
            self._forget(len(window) - KEPT_TOKENS, len(window), MAX_HELD)
        return delta

    def flush(self) -> str:
        """What was held back, as it stands; the choice is over."""
        delta = self._decode(self._window)[self._num_sent :]
        self._num_sent += len(delta)
        self.num_chars += len(delta)
        return delta

    def _certain(self) -> tuple[str, int]:
        """The text before an unfinished character and how many tokens hold it.

        Of a run of bytes that are no text: all but the last few characters, and no tokens.
        """
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return text, len(self._window)
        for num_clean in range(len(self._window) - 1, max(-1, len(self._window) - 1 - MAX_HELD), -1):
            before = self._decode(self._window[:num_clean])
            if not before.endswith(REPLACEMENT):
                return before, num_clean
        return text[:-MAX_HELD], 0

    def _forget(self, start: int, end: int, num_held: int) -> None:
        """Drop the tokens before `start`; what those before `end` say is out, but for `num_held` characters."""
        del self._window[:start]
        self._clean_end = end - start
        self._num_sent = max(0, len(self._decode(self._window[: self._clean_end])) - num_held)
