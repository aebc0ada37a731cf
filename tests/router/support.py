"""Tokenizers, catalogs and an HTTP client for the gateway's tests."""

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from registry.catalog import Catalog
from registry.types import (
    AdapterRecord,
    BaseSpec,
    CatalogDelta,
    ModuleSpec,
    ReplicaRecord,
    VersionRecord,
    VersionState,
)
from router.app import create_app
from router.config import RouterConfig
from router.gateway import Gateway
from tests.router.fakes import FakeFleet, FakeRegistry

BASE_NAME = "tiny-base"
CONTEXT = 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte: id = rank of the byte's stand-in, then <s> (256) and </s> (257). Adds <s> to raw text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama-2 style: words with a metaspace, byte fallback for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁there", ",", "s", "▁"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTES = byte_tokenizer()
VOCAB = 260


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(BYTES.encode(text, add_special_tokens=False).ids)


def sha256_of(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def digest(number: int) -> str:
    return f"{number:016x}" + "0" * 48


TOKENIZER_SHA = sha256_of(BYTES)


def base_spec(**changes: Any) -> BaseSpec:
    fields: dict[str, Any] = {
        "base_id": "org/tiny",
        "digest": digest(1),
        "architecture": "LlamaForCausalLM",
        "modules": (ModuleSpec(path="model.layers.0.q_proj", in_features=8, out_features=8, sha256=digest(2)),),
        "context_length": CONTEXT,
        "vocab_size": VOCAB,
        "tokenizer_sha256": TOKENIZER_SHA,
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "eos_token_ids": (257,),
    }
    return BaseSpec(**(fields | changes))


def version_record(number: int, state: VersionState = VersionState.ACTIVE) -> VersionRecord:
    return VersionRecord(
        number=number,
        digest=digest(1000 + number),
        state=state,
        created_at_s=100.0 + number,
        num_bytes=10,
        max_rank=8,
        target_names=("q_proj",),
    )


def adapter_record(name: str, live: int | None = 1, num_versions: int = 1, **aliases: int) -> AdapterRecord:
    return AdapterRecord(
        name=name,
        owner="default",
        revision=1,
        created_at_s=100.0,
        aliases=({} if live is None else {"live": live}) | aliases,
        versions=tuple(version_record(i + 1) for i in range(num_versions)),
    )


def replica_record(number: int, resident: tuple[str, ...] = ()) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id=f"r{number}", ring_id=number, node_id="n", num_slots=4, revision=1, resident=resident
    )


def delta(
    adapters: Sequence[AdapterRecord] = (adapter_record("legal"),),
    num_replicas: int = 2,
    revision: int = 1,
    base: BaseSpec | None = None,
    *,
    has_base: bool = True,
) -> CatalogDelta:
    return CatalogDelta(
        revision=revision,
        full=True,
        adapters=tuple(adapters),
        replicas=tuple(replica_record(i) for i in range(num_replicas)),
        base=(base or base_spec()) if has_base else None,
    )


class Stack:
    """A gateway over fakes, and a client of its application."""

    def __init__(self, config: RouterConfig | None = None, base_names: Sequence[str] = (BASE_NAME,)) -> None:
        self.fleet = FakeFleet()
        self.registry = FakeRegistry({TOKENIZER_SHA: BYTES.to_str().encode()})
        self.gateway = Gateway(config or RouterConfig(), Catalog(base_names), self.fleet, self.registry)
        self.app: FastAPI = create_app(self.gateway)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://gateway")

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "legal", "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "legal", "prompt": "hi"} | fields)

    def check_idle(self) -> None:
        """Everything that was leased is back."""
        self.gateway.check_integrity()
        assert self.gateway.admission.num_in_flight == 0, repr(self.gateway)
        assert self.gateway.placement.num_leases == 0, repr(self.gateway)
        assert self.fleet.num_open == 0, "a stream of the fleet was left open"


@asynccontextmanager
async def running(config: RouterConfig | None = None, catalog: CatalogDelta | None = None) -> AsyncIterator[Stack]:
    """A stack that has applied a catalog; checks at the end that no lease is left."""
    stack = Stack(config)
    await stack.gateway.apply(catalog or delta())
    async with stack.http:
        yield stack
        stack.check_idle()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], response.text
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def streamed_text(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice, from the chunks of either endpoint."""
    texts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                texts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(texts)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error
