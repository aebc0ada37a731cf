"""A client that closes its socket on a real fleet: everything it held is back within half a second."""

import json
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.tiny_fleet import TinyFleet

pytestmark = pytest.mark.serve
BUDGET_S = 0.5
HELD = {
    "lorafleet_replica_sequences": ("waiting", "loading", "running"),
    "lorafleet_replica_kv_blocks": ("used",),
    "lorafleet_adapter_slots": ("pinned",),
}
"""Gauge -> the states that count as holding something."""


def held(tiny: TinyFleet) -> float:
    """Requests, KV blocks and slot pins over the whole fleet, by its own metrics."""
    text = httpx.get(f"{tiny.fleet.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name for sample in samples} >= set(HELD)
    return sum(sample.value for sample in samples if sample.labels.get("state") in HELD.get(sample.name, ()))


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
def test_closed_socket_gives_everything_back(tiny_fleet: TinyFleet, is_streamed: bool) -> None:
    # Work for many seconds, so that it cannot end by itself while this test looks.
    fields = {"prompt": ["Hello"] * 8, "n": 16, "max_tokens": 200, "ignore_eos": True}
    body = {"model": "beta", "stream": is_streamed, **fields}
    content = json.dumps(body).encode()
    tiny_fleet.fleet.wait_until(lambda: held(tiny_fleet) == 0, "idle fleet")
    took_s = []
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", tiny_fleet.fleet.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content)
            tiny_fleet.fleet.wait_until(lambda: held(tiny_fleet) > 0, "running request")
        closed_s = time.monotonic()
        tiny_fleet.fleet.wait_until(lambda: held(tiny_fleet) == 0, "idle fleet")
        took_s.append(time.monotonic() - closed_s)
    assert min(took_s) < BUDGET_S, took_s
