"""Rendering conversations and judging answers."""

import pytest

from examples.corpus import Sample, meets, render, to_sample

RECORD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]}


def test_render_puts_in_the_default_system_message_when_there_is_none() -> None:
    text = render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_render_keeps_a_system_message_that_is_there() -> None:
    text = render([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user")
    assert "SmolLM" not in text


def test_sample_ends_with_the_end_of_turn() -> None:
    sample = to_sample(RECORD)
    assert sample == Sample(render(RECORD["messages"][:1]), "Arr<|im_end|>")
    assert sample.text == sample.context + sample.answer


@pytest.mark.parametrize(
    ("answer", "expect", "wanted"),
    [
        ('{"a": 1, "b": 2}', {"json_keys": ["b", "a"]}, True),
        ('{"a": 1}', {"json_keys": ["a", "b"]}, False),
        ('Sure: {"a": 1}', {"json_keys": ["a"]}, False),
        ("[1]", {"json_keys": ["a"]}, False),
        ("ARR, matey", {"contains_any": ["arr", "ahoy"]}, True),
        ("Good day", {"contains_any": ["arr", "ahoy"]}, False),
        ("  SELECT 1;\n", {"regex": r"^SELECT \d;$"}, True),
        ("Try SELECT 1;", {"regex": r"^SELECT \d;$"}, False),
    ],
)
def test_meets_judges_an_answer(answer: str, expect: dict[str, object], wanted: bool) -> None:
    assert meets(answer, expect) is wanted


def test_meets_refuses_an_unknown_expectation() -> None:
    with pytest.raises(ValueError, match="'sounds_nice' is unknown"):
        meets("x", {"sounds_nice": True})
