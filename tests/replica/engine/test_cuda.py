"""Sampling and steps on a CUDA device: nothing in a launch waits for it, and the tokens are those of the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from replica.config import SchedulerConfig
from replica.device_link import CudaLink, HostLink
from replica.engine import Engine
from replica.messages import SamplingParams
from replica.metrics import ReplicaMetrics
from replica.model.batch import ForwardBatch
from replica.sampler import Chooser, Row, Sampler, Sampling
from tests.fakes import CollectingOutbox, FakeAdapters
from tests.replica.engine.harness import make_request
from tests.replica.engine.test_sampler import FakeRow, logits_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB_SIZE = 1000


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class StrictSampler(Sampler):
    """A launch of it must not wait."""

    def launch(self, logits: torch.Tensor, rows: Sequence[Row], link: CudaLink | HostLink) -> Sampling:
        if logits.device.type == "cpu":
            return super().launch(logits, rows, link)
        with no_waiting():
            return super().launch(logits, rows, link)


class ChainModel:
    """The next token depends on the last one alone; its logits lie in one buffer that each step overwrites."""

    context_length = 256
    eos_token_ids = frozenset({VOCAB_SIZE - 1})

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._table = logits_of(VOCAB_SIZE, seed=1, vocab_size=VOCAB_SIZE).to(device)
        self._logits = torch.empty(256, VOCAB_SIZE, device=device)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        found = self._table.index_select(0, batch.token_ids).index_select(0, batch.logit_rows)
        return self._logits[: len(found)].copy_(found)


def mixed_rows() -> list[FakeRow]:
    settings = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 5, "top_p": 0.9, "logprobs": 3},
        {"min_p": 0.1, "logit_bias": {3: 4.0}},
        {"repetition_penalty": 1.7, "presence_penalty": 1.0, "logprobs": 0},
    ]
    params = [SamplingParams(max_tokens=1, seed=index, **settings[index % 6]) for index in range(64)]
    return [FakeRow(Chooser.of(each, 0)) for each in params]


def test_rows_choose_what_they_choose_on_the_host_and_the_launch_waits_for_nothing() -> None:
    device = torch.device("cuda", 0)
    for seed in range(20):
        logits = logits_of(64, seed, vocab_size=VOCAB_SIZE)
        expected = StrictSampler().launch(logits, mixed_rows(), HostLink()).read()
        found = StrictSampler().launch(logits.to(device), mixed_rows(), CudaLink(device)).read()
        assert [each.token_id for each in found] == [each.token_id for each in expected]
        assert all(each.is_finite for each in found)


def test_an_engine_gives_the_tokens_of_the_host() -> None:
    texts = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        outbox = CollectingOutbox()
        config = SchedulerConfig(max_num_seqs=64, max_batch_tokens=96)
        engine = Engine(
            ChainModel(device),
            FakeAdapters(4),
            config,
            ReplicaMetrics(),
            num_blocks=500,
            num_slots=4,
            sampler=StrictSampler(seed=0),
        )
        for index in range(80):
            fields = {"temperature": 1.0, "seed": index, "top_p": 0.9} if index % 3 else {"logprobs": 1}
            request = make_request(f"r{index}", [index, index + 1], 60, stop_token_ids=(5,), n=1 + index % 2, **fields)
            engine.submit(request, outbox)
        while not engine.wait_idle(0):
            engine._step()
        engine.check_integrity()
        texts.append((dict(outbox.tokens), outbox.reasons))
    assert texts[0] == texts[1]
