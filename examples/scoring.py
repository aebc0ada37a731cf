"""Samples as padded tensors, and the log-probabilities of their answers under a model on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from examples.corpus import Sample

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """int64 [batch, length], padded at the right. `labels[i, j]` is the token after position j, or IGNORED."""

    token_ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


def encode(tokenizer: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the whole text, and per position the next token where that belongs to the answer."""
    encoded = tokenizer(sample.text, return_offsets_mapping=True, add_special_tokens=False)
    token_ids = torch.tensor(encoded["input_ids"])
    is_answer = torch.tensor([start >= len(sample.context) for start, _ in encoded["offset_mapping"]])
    labels = torch.where(is_answer, token_ids, IGNORED).roll(-1)
    labels[-1] = IGNORED
    return token_ids, labels


def collate(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], pad_token_id: int) -> Batch:
    """One batch of encoded samples."""
    token_ids = pad_sequence([ids for ids, _ in pairs], batch_first=True, padding_value=pad_token_id)
    labels = pad_sequence([labels for _, labels in pairs], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(ids) for ids, _ in pairs])
    mask = (torch.arange(token_ids.shape[1]) < lengths[:, None]).long()
    return Batch(token_ids, mask, labels)


def answer_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Negative log-probabilities of the answers' tokens, fp32 [num answer tokens].

    `model` is a causal LM of transformers, with or without LoRA layers inside. The head is computed only where a
    label is, which on a small model with a large vocabulary is half of the work.
    """
    hidden = model.get_decoder()(input_ids=batch.token_ids, attention_mask=batch.mask, use_cache=False)
    is_answer = batch.labels != IGNORED
    logits = model.get_output_embeddings()(hidden.last_hidden_state[is_answer])
    return cross_entropy(logits.float(), batch.labels[is_answer], reduction="none")


@torch.inference_mode()
def answer_logprobs(model: Any, tokenizer: Any, samples: Sequence[Sample], batch_size: int = 8) -> list[float]:
    """Log-probabilities (natural log) of every token of the samples' answers."""
    pairs = sorted((encode(tokenizer, sample) for sample in samples), key=lambda pair: len(pair[0]))
    logprobs: list[float] = []
    for start in range(0, len(pairs), batch_size):
        batch = collate(pairs[start : start + batch_size], tokenizer.pad_token_id)
        logprobs.extend((-answer_losses(model, batch)).tolist())
    return logprobs
