"""The tenants' data on disk and as the text that the base model sees. Knows nothing of models or servers."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent
DATA = EXAMPLES / "data"
ADAPTERS = EXAMPLES / "adapters"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the base's chat template says when a conversation brings no system message."""
END_OF_TURN = "<|im_end|>"

Message = Mapping[str, str]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A rendered conversation: `context` up to the assistant's turn, `answer` with its end-of-turn token."""

    context: str
    answer: str

    @property
    def text(self) -> str:
        return self.context + self.answer

    @property
    def num_answer_chars(self) -> int:
        """Characters of the answer without its end-of-turn token."""
        return len(self.answer) - len(END_OF_TURN)


def tenants() -> list[str]:
    """The names of the tenants that have data, in alphabetical order."""
    return sorted(path.parent.name for path in DATA.glob("*/train.jsonl"))


def read_records(tenant: str, stem: str) -> list[Record]:
    """The records of `data/<tenant>/<stem>.jsonl`."""
    text = (DATA / tenant / f"{stem}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def render(messages: Sequence[Message]) -> str:
    """The messages in the base's chat template, ready for the assistant to go on."""
    if messages[0]["role"] != "system":
        messages = ({"role": "system", "content": SYSTEM}, *messages)
    turns = (f"<|im_start|>{message['role']}\n{message['content']}{END_OF_TURN}\n" for message in messages)
    return "".join(turns) + "<|im_start|>assistant\n"


def to_sample(record: Record) -> Sample:
    """A train or held-out record, whose last message is the assistant's."""
    *before, last = record["messages"]
    return Sample(render(before), last["content"] + END_OF_TURN)


def meets(answer: str, expect: Record) -> bool:
    """Whether an answer satisfies a golden record's expectation. Raises ValueError for an unknown one."""
    ((kind, wanted),) = expect.items()
    if kind == "json_keys":
        return has_json_keys(answer, wanted)
    if kind == "contains_any":
        return any(word.lower() in answer.lower() for word in wanted)
    if kind == "regex":
        return re.search(wanted, answer.strip()) is not None
    raise ValueError(f"expectation {kind!r} is unknown; allowed: json_keys, contains_any, regex")


def has_json_keys(answer: str, keys: Sequence[str]) -> bool:
    """Whether the whole answer is one JSON object with exactly these keys."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and set(value) == set(keys)
