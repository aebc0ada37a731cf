"""Log-probabilities of tokens and of their likeliest rivals, over the raw distribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replica.device_link import DeviceLink, Fetched
from replica.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Log-probabilities on their way to the host; row i wants the `num_top[i]` likeliest."""

    num_top: Sequence[int]
    fetched: Fetched

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """One entry a row; `token_ids` are those that were scored, known on the host by now."""
        own, *top = self.fetched.lists()
        if not top:
            return [TokenLogprob(*each) for each in zip(token_ids, own, strict=True)]
        likeliest = zip(*top, self.num_top, strict=True)
        tops = [tuple(zip(ids[:k], values[:k], strict=True)) for ids, values, k in likeliest]
        return [TokenLogprob(*each) for each in zip(token_ids, own, tops, strict=True)]


def score_rows(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int], link: DeviceLink) -> ScoredRows:
    """Score int64 `token_ids` [rows] in float32 `logits` [rows, vocabulary]; waits for nothing."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
    if not any(num_top):
        return ScoredRows(num_top, link.fetch(own))
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return ScoredRows(num_top, link.fetch(own, top.indices, top.values))
