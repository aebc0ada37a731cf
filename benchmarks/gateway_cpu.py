"""What does a streamed token cost in the gateway? CPU microseconds through the whole ASGI application, no network.

Run: python -m benchmarks.gateway_cpu [--tokenizer FILE] [--tokens 400] [--streams 16]
Counts process CPU time over all streams, less that of draining the same fake fleet alone.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.provenance import save
from registry.catalog import Catalog
from registry.types import BaseSpec, CatalogDelta, ModuleSpec, ReplicaRecord
from replica.messages import GenerateRequest, TokenChunk
from router.app import create_app
from router.config import RouterConfig
from router.gateway import Gateway

SHA = "0" * 64
Message = Sequence[TokenChunk]


class EndlessFleet:
    """Answers every request with the same tokens, `per_message` at a time."""

    def __init__(self, token_ids: Sequence[int], per_message: int) -> None:
        self._token_ids = token_ids
        self._per_message = per_message

    async def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Message]:
        step, last = self._per_message, len(self._token_ids)
        for start in range(0, last, step):
            ids = tuple(self._token_ids[start : start + step])
            reason: Any = "length" if start + step >= last else None
            await asyncio.sleep(0)
            yield (TokenChunk(request.request_id, 0, ids, finish_reason=reason),)

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None:
        return

    async def metrics(self) -> Mapping[str, bytes]:
        return {}


class BlobRegistry:
    """Only what `Gateway.apply` needs."""

    def __init__(self, tokenizer_json: str) -> None:
        self._blob = tokenizer_json.encode()

    async def read_blob(self, sha256: str) -> bytes:
        return self._blob


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


async def application(tokenizer: Tokenizer, fleet: EndlessFleet) -> FastAPI:
    spec = BaseSpec(
        base_id="base",
        digest=SHA,
        architecture="x",
        modules=(ModuleSpec(path="q", in_features=1, out_features=1, sha256=SHA),),
        context_length=100_000,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_sha256=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        bos_token=None,
        eos_token=None,
        eos_token_ids=(0,),
    )
    registry: Any = BlobRegistry(tokenizer.to_str())
    gateway = Gateway(RouterConfig(), Catalog(("base",)), fleet, registry)
    replica = ReplicaRecord(replica_id="r0", ring_id=0, node_id="n", num_slots=1, revision=1)
    await gateway.apply(CatalogDelta(revision=1, full=True, adapters=(), replicas=(replica,), base=spec))
    return create_app(gateway)


async def stream_once(app: FastAPI, body: bytes) -> int:
    """One streamed call; returns the number of body messages."""
    asked, forever, count = False, asyncio.Event(), 0

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await forever.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal count
        count += 1
        assert message.get("status", 200) == 200

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "root_path": "", "headers": []}
    scope |= {"raw_path": b"", "query_string": b"", "http_version": "1.1", "scheme": "http"}
    await app(scope, receive, send)  # type: ignore[arg-type]
    return count


async def drain(fleet: EndlessFleet) -> None:
    request: Any = type("R", (), {"request_id": "r"})
    async for _ in fleet.generate("r0", request):
        pass


async def cpu_us_per_token(
    app: FastAPI, fleet: EndlessFleet, num_tokens: int, streams: int, extra: dict[str, Any]
) -> float:
    body = {"model": "base", "stream": True, "messages": [{"role": "user", "content": "hi"}]} | extra
    encoded = json.dumps(body).encode()
    await stream_once(app, encoded)
    started = time.process_time()
    await asyncio.gather(*(drain(fleet) for _ in range(streams)))
    middle = time.process_time()
    await asyncio.gather(*(stream_once(app, encoded) for _ in range(streams)))
    gateway_s = (time.process_time() - middle) - (middle - started)
    return gateway_s / (streams * num_tokens) * 1e6


async def main(args: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    tokenizer = Tokenizer.from_file(str(args.tokenizer)) if args.tokenizer else byte_tokenizer()
    text = "The quick brown fox jumps over the lazy dog; naïve café, 你好 😀. " * 200
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids[: args.tokens]
    print(f"python {sys.version.split()[0]}, {args.streams} streams of {len(token_ids)} tokens, best of 5")
    for per_message in (1, 4):
        for name, extra in (("plain", {}), ("stop string", {"stop": ["\n\nUser:"]})):
            fleet = EndlessFleet(token_ids, per_message)
            app = await application(tokenizer, fleet)
            runs = [await cpu_us_per_token(app, fleet, len(token_ids), args.streams, extra) for _ in range(5)]
            print(f"{per_message} token(s) a message, {name:12s} {min(runs):6.1f} us of CPU a token")
            results.append({"tokens_a_message": per_message, "case": name, "cpu_us_per_token": round(min(runs), 1)})
    conditions = {"streams": args.streams, "tokens": args.tokens, "tokenizer": "one token a byte"}
    if args.tokenizer:
        conditions["tokenizer"] = args.tokenizer.parent.name
    print(save("gateway_cpu", __doc__ or "", conditions, results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default one token a byte")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=16)
    asyncio.run(main(parser.parse_args()))
