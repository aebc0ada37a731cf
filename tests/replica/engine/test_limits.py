"""What is refused before it is queued, and what the message names."""

from typing import Any

import pytest

from replica.errors import InvalidRequest
from replica.limits import RequestLimits
from tests.replica.engine.harness import make_request

LIMITS = RequestLimits(vocab_size=264, context_length=256, num_blocks=20, block_size=4)

BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [264]}, "token id 264 is outside the vocabulary of 264"),
    ({"prompt": [3, -1]}, "token id -1 is outside"),
    ({"max_tokens": 300}, "context length of 256"),
    ({"prompt": [1] * 200, "max_tokens": 57}, "context length of 256"),
    ({"prompt": [1] * 60, "max_tokens": 22}, "needs 21 KV blocks of 4 tokens; the cache has 20"),
    ({"prompt": [1] * 81, "max_tokens": 0}, "needs 21 KV blocks"),
    ({"max_tokens": -1}, "max_tokens is -1; allowed: >= 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"presence_penalty": float("inf")}, "presence_penalty is inf; allowed: finite"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias"),
    ({"logit_bias": {264: 1.0}}, "token id 264"),
    ({"stop_token_ids": (-5,)}, "token id -5"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"n": 0}, "n is 0"),
    ({"weight": 0.0}, "weight is 0.0; allowed: above 0"),
    ({"weight": float("nan")}, "weight is nan"),
    ({"expected_tokens": -3}, "expected_tokens is -3"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_REQUESTS, ids=[message for _, message in BAD_REQUESTS])
def test_a_bad_request_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LIMITS.check(make_request("a", **{"prompt": [1], "max_tokens": 2, **fields}))


GOOD_REQUESTS: list[dict[str, Any]] = [
    {},
    {"prompt": [0, 263]},
    {"prompt": [1] * 60, "max_tokens": 21},
    {"prompt": [1] * 80, "max_tokens": 0},
    {"max_tokens": 0, "prompt_logprobs": 5},
    {"logit_bias": {0: -100.0, 263: 100.0}, "stop_token_ids": (0,), "expected_tokens": 0, "weight": 1e-9},
]


@pytest.mark.parametrize("fields", GOOD_REQUESTS, ids=str)
def test_what_can_be_served_passes(fields: dict[str, Any]) -> None:
    LIMITS.check(make_request("a", **{"prompt": [1], "max_tokens": 2, **fields}))
