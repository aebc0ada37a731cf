"""The base model's tokenizer: text to token ids and token ids to what clients see of them.

Built from the `tokenizer.json` that the replicas published; knows nothing of models or requests.
"""

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from registry.types import BaseSpec
from router.chat_template import ChatTemplate, Message
from router.errors import BadRequest

INLINE_CHARS = 4096
"""Longer texts are encoded on a thread: they take more than about 4 ms, which would delay every stream."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE gives to bytes, as character -> byte.

    Printable Latin-1 stands for itself; the other bytes, in order, take the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES_OF_CHARS = _byte_alphabet()


class BaseTokenizer:
    """Encodes prompts and describes tokens of the base model `base`."""

    def __init__(self, tokenizer_json: str, base: BaseSpec) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.base = base
        self.special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._template = _chat_template(base)
        self._is_byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer_json).get("decoder"))
        self.token_text = lru_cache(maxsize=8192)(self._token_text)
        self.token_bytes = lru_cache(maxsize=8192)(self._token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the rendered conversation. The template writes BOS itself, so no special token is added."""
        if self._template is None:
            raise BadRequest("this base model has no chat template; use /v1/completions", "messages")
        return await self._encode(self._template.render(messages), add_special_tokens=False)

    async def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a raw completion prompt, with the special tokens that the tokenizer adds."""
        return await self._encode(text, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out, incomplete characters as U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= INLINE_CHARS:
            return self._encode_now(text, add_special_tokens)
        return await asyncio.to_thread(self._encode_now, text, add_special_tokens)

    def _encode_now(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _token_text(self, token_id: int) -> str:
        """One token as logprobs show it: its text, or `bytes:\\xe2\\x82` for a part of a character."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return str(text)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def _token_bytes(self, token_id: int) -> tuple[int, ...]:
        """The UTF-8 bytes of one token; empty for an id that the tokenizer does not know."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ()
        if self._is_byte_level and all(char in _BYTES_OF_CHARS for char in token):
            return tuple(_BYTES_OF_CHARS[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return (int(token[3:5], 16),)
        return tuple(self._tokenizer.decode([token_id], skip_special_tokens=False).encode())


def _chat_template(base: BaseSpec) -> ChatTemplate | None:
    if base.chat_template is None:
        return None
    named = {"bos_token": base.bos_token, "eos_token": base.eos_token}
    return ChatTemplate(base.chat_template, {name: token for name, token in named.items() if token is not None})
