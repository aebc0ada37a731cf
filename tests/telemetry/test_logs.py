"""Log lines: one a record whatever it holds, with its fields, without keys."""

import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.keys import mint
from telemetry.logs import LOGGERS, EventRecord, FleetHandler, JsonFormatter, TextFormatter, event
from tests.log_capture import CapturedLog, captured_log

logger = logging.getLogger("router.somewhere")
NASTY = "a\nb\r\x1b[31m\x00\u2028\x85c"


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as captured:
        yield captured


@pytest.fixture
def text_log() -> Iterator[CapturedLog]:
    with captured_log("text") as captured:
        yield captured


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("router", logging.INFO, "file", 1, message, None, None)
    made.fields = fields
    return made


def test_json_line_has_the_process_and_the_fields(log: CapturedLog) -> None:
    logger.info("request", extra={"fields": {"tenant": "acme", "version": 2, "digest": None, "total_ms": 1.5}})
    (line,) = log.lines
    time = line.pop("time")
    assert len(time) == len("2026-11-30T05:00:00.123Z")
    assert line == {
        "level": "info", "role": "test", "member": "m-1", "logger": "router.somewhere", "message": "request",
        "tenant": "acme", "version": 2, "digest": None, "total_ms": 1.5,
    }  # fmt: skip


def test_text_line_is_for_people(text_log: CapturedLog) -> None:
    logger.warning("slow %s", "request", extra={"fields": {"tenant": "acme", "note": "two words", "digest": None}})
    assert text_log.text.partition(" ")[2] == 'WARNING test slow request tenant=acme note="two words" digest=-\n'


def test_event_is_a_line_like_any_other_for_every_handler(log: CapturedLog, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("router").addHandler(caplog.handler)
    logger.info("request", extra={"fields": {"tenant": "acme"}})
    event(logger, "request", {"tenant": "acme"})
    event(logging.getLogger("router.quiet"), "request", {})
    plain, made, _ = log.lines
    assert {**plain, "time": None} == {**made, "time": None}
    assert plain["time"] <= made["time"]
    assert [record.getMessage() for record in caplog.records] == ["request"] * 3
    assert "request" in caplog.text


def test_fields_never_hide_what_the_line_says_itself(log: CapturedLog) -> None:
    logger.info("request", extra={"fields": {"message": "other", "level": "none", "member": "x"}})
    (line,) = log.lines
    assert (line["message"], line["level"], line["member"]) == ("request", "info", "m-1")


@given(st.text(), st.text(), st.text())
def test_any_text_stays_on_one_line(message: str, name: str, value: str) -> None:
    made = record(message.replace("%", ""), **{name: value})
    for formatter in (JsonFormatter("r", "m"), TextFormatter("r", "m")):
        line = formatter.format(made)
        assert len(line.splitlines()) == 1
        line.encode()


VALUES = (
    st.text()
    | st.sampled_from(("acme", 'a"b', "a\\b", "é", "\x7f", "x" * 257, "lf_0123456789ab_secret"))
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.none()
    | st.just(("a", 1))
)


@given(
    st.sampled_from(("request", 'say "no"')),
    st.dictionaries(st.text(max_size=3) | st.sampled_from(("tenant", "level", 'a"')), VALUES, max_size=4),
)
def test_event_has_the_line_that_any_record_with_its_fields_has(message: str, fields: dict[str, object]) -> None:
    made = EventRecord("router", message, fields)
    plain = record(message)
    plain.fields, plain.created, plain.msecs = fields, made.created, made.msecs
    formatter = JsonFormatter("r", "m")
    line, other = formatter.format(made), formatter.format(plain)
    assert "\n" not in line
    assert repr(json.loads(line)) == repr(json.loads(other))


def test_numbers_are_to_a_thousandth(text_log: CapturedLog) -> None:
    event(logger, "request", {"ms": 1234.56789, "none": 0.0, "tiny": 1e-7, "huge": 1e300, "less": -1.5})
    assert "ms=1234.568 none=0.000 tiny=0.000 huge=1e+300 less=-1.500" in text_log.text


def test_text_line_shows_control_characters_written_out() -> None:
    line = TextFormatter("r", "m").format(record(NASTY, name=NASTY))
    assert r"a\nb\r\x1b[31m\x00\u2028\x85c" in line
    assert line.isprintable()


def test_huge_values_are_cut() -> None:
    made = record("m" * 100_000, name="v" * 1_000_000)
    for formatter in (JsonFormatter("r", "m"), TextFormatter("r", "m")):
        assert len(formatter.format(made)) < 3_000


def test_traceback_is_marked_in_text_and_a_field_in_json() -> None:
    formats = {}
    for kind in ("text", "json"):
        with captured_log(kind) as log:  # type: ignore[arg-type]
            try:
                raise ValueError(f"broken\n2026-11-30T05:00:00.123Z INFO forged {NASTY}")
            except ValueError:
                logger.exception("it failed")
            formats[kind] = log.text
    first, *rest = formats["text"].splitlines()
    assert first.endswith("ERROR test it failed")
    assert all(line.startswith("| ") for line in rest)
    assert any("forged" in line for line in rest)
    line = json.loads(formats["json"])
    assert "ValueError: broken" in line["traceback"]


def test_a_key_is_blacked_out_wherever_it_stands(log: CapturedLog) -> None:
    keys = [mint() for _ in range(50)]
    for key in keys:
        try:
            raise ValueError(key.text)
        except ValueError:
            logger.exception("key %s", key.text, extra={"fields": {"tenant": key.text}})
    for key in keys:
        secret = key.text.split("_", 2)[2]
        assert secret not in log.text
        assert f"lf_{key.key_id}_***" in log.text


def test_level_holds_and_other_loggers_are_left_alone() -> None:
    with captured_log(level="warning") as log:
        logger.info("no")
        logging.getLogger("somebody.else").warning("not ours")
        logger.warning("yes")
    assert [line["message"] for line in log.lines] == ["yes"]


def test_setting_up_again_replaces_the_handler() -> None:
    with captured_log() as first, captured_log() as second:
        logger.info("once")
        counts = [sum(isinstance(each, FleetHandler) for each in logging.getLogger(name).handlers) for name in LOGGERS]
    assert first.text == ""
    assert len(second.lines) == 1
    assert set(counts) == {1}
