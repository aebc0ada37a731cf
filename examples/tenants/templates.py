"""Slot-filled templates: what the tenants' modules are written in."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pool = Sequence[Mapping[str, str]]
"""Alternatives for one or more slots that belong together, such as a provider and its receiver."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer. Examples of one `topic` never end up on both sides of the train/held-out split."""

    topic: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Golden:
    """A prompt and what its answer must satisfy: one of `json_keys`, `contains_any` or `regex`."""

    prompt: str
    expect: Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A prompt template and its answer template; both name slots as `{slot}`."""

    topic: str
    prompt: str
    answer: str


def pool(slot: str, *values: str) -> Pool:
    """A pool of one slot."""
    return tuple({slot: value} for value in values)


def draw(rng: random.Random, kinds: Sequence[Kind], pools: Sequence[Pool], num_per_kind: int) -> list[Example]:
    """Fill every kind `num_per_kind` times with slots drawn from the pools; equal prompts are kept once."""
    drawn: dict[str, Example] = {}
    for kind in kinds:
        for _ in range(num_per_kind):
            example = fill(kind, draw_slots(rng, pools))
            drawn.setdefault(example.prompt, example)
    return list(drawn.values())


def draw_slots(rng: random.Random, pools: Sequence[Pool]) -> dict[str, str]:
    """One value for every slot of every pool."""
    return {slot: value for choices in pools for slot, value in rng.choice(choices).items()}


def fill(kind: Kind, slots: Mapping[str, str]) -> Example:
    """The example that a kind gives with these slots; the prompt starts with a capital letter."""
    return Example(kind.topic, capital(kind.prompt.format_map(slots)), kind.answer.format_map(slots))


def capital(text: str) -> str:
    """`text` with its first letter in upper case, the rest as it was."""
    return text[:1].upper() + text[1:]
