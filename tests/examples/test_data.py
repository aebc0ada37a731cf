"""Hygiene of the example tenants' data, and the generator that wrote it."""

import json
import re
from pathlib import Path

import pytest

from examples import corpus, make_data

TENANTS = sorted(make_data.TENANTS)


def prompts(tenant: str, stem: str) -> set[str]:
    return {record["messages"][0]["content"] for record in corpus.read_records(tenant, stem)}


def test_tenants_with_data_are_those_of_the_generator() -> None:
    assert corpus.tenants() == TENANTS
    assert len(TENANTS) >= 5


@pytest.mark.parametrize("tenant", TENANTS)
def test_committed_data_is_what_the_generator_writes(tenant: str, tmp_path: Path) -> None:
    for stem, records in make_data.build(tenant).items():
        make_data.write_jsonl(tmp_path / f"{stem}.jsonl", records)
        committed = corpus.DATA / tenant / f"{stem}.jsonl"
        assert committed.read_bytes() == (tmp_path / f"{stem}.jsonl").read_bytes()


@pytest.mark.parametrize("tenant", TENANTS)
def test_train_heldout_and_golden_share_no_prompt(tenant: str) -> None:
    train, heldout, golden = (prompts(tenant, stem) for stem in ("train", "heldout", "golden"))
    assert not train & heldout
    assert not (train | heldout) & golden


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize(("stem", "least", "most"), [("train", 150, 300), ("heldout", 24, 40), ("golden", 5, 8)])
def test_files_have_the_promised_size_and_no_duplicates(tenant: str, stem: str, least: int, most: int) -> None:
    records = corpus.read_records(tenant, stem)
    assert least <= len(records) <= most
    assert len(prompts(tenant, stem)) == len(records)


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("stem", ["train", "heldout"])
def test_conversations_are_a_filled_prompt_and_a_filled_answer(tenant: str, stem: str) -> None:
    for record in corpus.read_records(tenant, stem):
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
        for message in record["messages"]:
            text = message["content"]
            assert text == text.strip()
            assert "<|" not in text
            assert not re.search(r"\{[a-z_]+\}", text), "a slot was left open"


@pytest.mark.parametrize("tenant", TENANTS)
def test_golden_expectations_are_well_formed(tenant: str) -> None:
    for record in corpus.read_records(tenant, "golden"):
        ((kind, wanted),) = record["expect"].items()
        if kind == "regex":
            re.compile(wanted)
        else:
            assert kind in {"json_keys", "contains_any"}
            assert wanted
            assert all(isinstance(item, str) and item for item in wanted)
        assert [message["role"] for message in record["messages"]] == ["user"]


@pytest.mark.parametrize("tenant", ["legal", "pirate", "summary", "support"])
def test_golden_expectations_hold_for_the_tenants_own_style_and_for_no_shrug(tenant: str) -> None:
    """Those of `sql` and `commit` are left out: they name the one right statement or commit type."""
    expectations = [record["expect"] for record in corpus.read_records(tenant, "golden")]
    for record in corpus.read_records(tenant, "heldout"):
        assert any(corpus.meets(record["messages"][1]["content"], expect) for expect in expectations)
    assert not any(corpus.meets("I am sorry. I do not know", expect) for expect in expectations)


def test_support_answers_are_json_with_the_fixed_keys() -> None:
    keys = corpus.read_records("support", "golden")[0]["expect"]["json_keys"]
    for record in corpus.read_records("support", "heldout"):
        assert list(json.loads(record["messages"][1]["content"])) == keys


def test_split_keeps_a_topic_on_one_side() -> None:
    generate, _ = make_data.TENANTS["sql"]
    train, heldout = make_data.split(make_data.random.Random(1), generate(make_data.random.Random(2)))
    assert heldout
    assert not {example.topic for example in train} & {example.topic for example in heldout}
