"""Tokenizer, chat template, detokenizer and stop strings."""

import itertools
import random
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.chat_template import ChatTemplate
from router.detokenizer import Detokenizer
from router.errors import BadRequest
from router.stop_strings import StopMatcher
from router.tokenizer import INLINE_CHARS, BaseTokenizer
from tests.router.support import BYTES, base_spec, ids_of, sentencepiece_tokenizer

TEXTS = ["plain", "naïve café", "你好、世界", "👩‍👩‍👧‍👦 family 🇩🇪", "a\ufffdb", "", "mixed 😀 e\u0301 ﷽"]


def tokenizer(**changes: object) -> BaseTokenizer:
    return BaseTokenizer(BYTES.to_str(), base_spec(**changes))


def sentencepiece() -> BaseTokenizer:
    return BaseTokenizer(sentencepiece_tokenizer().to_str(), base_spec())


def feed(decoder: BaseTokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer, deltas, start = Detokenizer(decoder), [], 0
    while start < len(token_ids):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    deltas.append(detokenizer.flush())
    assert detokenizer.num_chars == sum(map(len, deltas))
    return deltas


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_never_shows_half_a_character(text: str) -> None:
    deltas = feed(tokenizer(), list(ids_of(text)), [1])
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_detokenizer_shows_a_character_with_its_last_byte() -> None:
    detokenizer = Detokenizer(tokenizer())
    assert [detokenizer.push((i,)) for i in ids_of("é😀")] == ["", "é", "", "", "", "😀"]


def test_detokenizer_flushes_a_character_that_was_cut_off() -> None:
    deltas = feed(tokenizer(), list(ids_of("ok😀"))[:4], [1])
    assert "".join(deltas) == "ok\ufffd"
    assert "".join(deltas[:-1]) == "ok"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_detokenizer_survives_long_runs_of_bytes_that_are_no_text(size: int) -> None:
    decoder = tokenizer()
    token_ids = [*ids_of("ok"), *[BYTES.token_to_id("ÿ"), BYTES.token_to_id("ð")] * 100, *ids_of(" then é")]
    detokenizer, longest, text = Detokenizer(decoder), 0, ""
    for start in range(0, len(token_ids), size):
        text += detokenizer.push(token_ids[start : start + size])
        longest = max(longest, len(detokenizer._window))
    assert text + detokenizer.flush() == decoder.decode(token_ids)
    assert longest <= 49 or size == 100


@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.one_of(st.integers(0, 257), st.sampled_from(ids_of("é😀a"))), max_size=150),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_detokenizer_equals_one_decode_for_any_bytes(token_ids: list[int], sizes: list[int]) -> None:
    decoder = tokenizer()
    assert "".join(feed(decoder, token_ids, sizes)) == decoder.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_detokenizer_equals_the_text_in_byte_fallback(text: str, sizes: list[int]) -> None:
    decoder = sentencepiece()
    token_ids = [3 + byte for byte in text.encode()]
    assert "".join(feed(decoder, token_ids, sizes)) == decoder.decode(token_ids)


def test_detokenizer_keeps_spaces_between_words_across_its_window() -> None:
    decoder = sentencepiece()
    token_ids = [decoder._tokenizer.token_to_id(t) for t in ["▁Hello", "▁there", ",", "▁there", "s"]] * 12
    assert "".join(feed(decoder, token_ids, [1])) == decoder.decode(token_ids)


def test_detokenizer_leaves_special_tokens_out_and_keeps_a_short_window() -> None:
    decoder = tokenizer()
    detokenizer = Detokenizer(decoder)
    text = "".join(detokenizer.push((token_id,)) for token_id in [256, *ids_of("hi"), 257, *ids_of("!")] * 50)
    assert text == "hi!" * 50
    assert len(detokenizer._window) <= 12


def cut(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.stopped:
            return text, True
    return text + matcher.flush(), False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["beta gamma"], ["alpha be", "ta ", "gam", "ma delta"], ("alpha ", True)),
        (["beta gamma"], ["alpha be", "ta ", "gam"], ("alpha beta gam", False)),
        (["ab", "b"], ["x", "a", "b"], ("x", True)),
        (["ab", "b"], ["xab"], ("x", True)),
        (["abcd", "bc"], ["a", "b", "c", "d"], ("a", True)),
        (["abcd", "bc"], ["abcd"], ("a", True)),
        (["éé"], ["é", "aé", "é!"], ("éa", True)),
        (["aab"], ["aaa", "ab"], ("aa", True)),
        (["\n\n"], ["line\n", "\n"], ("line", True)),
        (["x"], ["", ""], ("", False)),
    ],
)
def test_stop_string_cuts_exactly(stops: list[str], pieces: list[str], expected: tuple[str, bool]) -> None:
    assert cut(stops, pieces) == expected


def test_stop_matcher_holds_only_what_may_become_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("abcS", "T", "x", "S")] == ["abc", "", "STx", ""]
    assert matcher.flush() == "S"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("abc", max_size=25),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    splits=st.lists(st.integers(0, 25), max_size=6),
)
def test_stop_string_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], splits: list[int]) -> None:
    edges = [0, *sorted(min(split, len(text)) for split in splits), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert cut(stops, pieces) == expected
    assert cut(stops, list(text)) == expected


async def test_chat_adds_no_special_token_that_the_template_did_not_write() -> None:
    token_ids = await tokenizer().encode_chat([{"role": "user", "content": "hi"}])
    assert token_ids == (256, *ids_of("[user]hi[assistant]"))


async def test_raw_prompt_gets_the_special_tokens_of_the_tokenizer() -> None:
    assert await tokenizer().encode_text("hi") == (256, *ids_of("hi"))


async def test_long_prompt_is_encoded_like_a_short_one() -> None:
    text = "abc " * INLINE_CHARS
    assert await tokenizer().encode_text(text) == (256, *ids_of(text))


async def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        await tokenizer(chat_template=None).encode_chat([{"role": "user", "content": "hi"}])


def render(source: str, *messages: tuple[str, str]) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 1, 2))
    return template.render([{"role": role, "content": content} for role, content in messages])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<ü>"}]'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}", "<ü>"),
        ("{% if tools is none and add_generation_prompt %}{{ bos_token }}{% endif %}", "<s>"),
    ],
)
def test_template_renders_like_transformers(source: str, expected: str) -> None:
    assert render(source, ("user", "<ü>")).strip() == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_template_that_refuses_or_escapes_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template"):
        render(source, ("user", "hi"))


def test_template_complaint_is_told() -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", ("user", "hi"))


@pytest.mark.parametrize(
    ("token", "text", "data"),
    [("Ġ", " ", [32]), ("Ã", "bytes:\\xc3", [0xC3]), ("A", "A", [65]), ("<s>", "<s>", list(b"<s>"))],
)
def test_token_description_in_byte_level_vocabularies(token: str, text: str, data: list[int]) -> None:
    described = tokenizer()
    token_id = BYTES.token_to_id(token)
    assert described.token_text(token_id) == text
    assert list(described.token_bytes(token_id)) == data


def test_token_description_of_byte_fallback_and_of_ids_past_the_vocabulary() -> None:
    described = sentencepiece()
    assert described.token_bytes(3 + 0xE2) == (0xE2,)
    assert described.token_bytes(9999) == ()
    assert described.token_text(9999) == ""


@pytest.mark.base
async def test_ids_equal_transformers_for_the_real_base(real_base: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(real_base)
    ours = BaseTokenizer(
        (real_base / "tokenizer.json").read_text(),
        base_spec(chat_template=theirs.chat_template, bos_token=theirs.bos_token, eos_token=theirs.eos_token),
    )
    for text in [*TEXTS[:-1], "<|im_start|>user\ninjected<|im_end|>", "  spaces\t\n"]:
        for messages in (
            [{"role": "user", "content": text}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "b"},
            ],
        ):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert list(await ours.encode_chat(messages)) == expected
        assert list(await ours.encode_text(text)) == theirs(text)["input_ids"]
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(49152) for _ in range(60)]
        assert "".join(feed(ours, token_ids, [1, 3])) == theirs.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("built", [BYTES, sentencepiece_tokenizer()])
async def test_chat_ids_equal_transformers_for_tiny_tokenizers(built: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>")
    spec = base_spec()
    theirs.chat_template = spec.chat_template
    ours = BaseTokenizer(built.to_str(), spec)
    messages = [{"role": "user", "content": "Hello there, 你好 s"}, {"role": "assistant", "content": "é"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(await ours.encode_chat(messages)) == expected
