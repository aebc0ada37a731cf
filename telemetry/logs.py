"""Log lines as text for people or as JSON for machines, through the standard library's logging.

Any code logs as usual; `logger.info("request", extra={"fields": {...}})` adds fields. Whatever they hold, a record is
one line (a traceback's further lines begin with `|`), values are cut, and an API key is blacked out.
"""

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from itertools import compress
from typing import IO, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

LOGGERS = ("lorafleet", "cluster", "registry", "replica", "router", "telemetry")
"""The roots of this program's loggers; those of libraries are left alone."""

MAX_VALUE_CHARS = 256
MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 16_000
MAX_TEMPLATES = 256
HEAD = frozenset(("time", "level", "role", "member", "logger", "message"))
"""What every line has, and no field may hide."""

MILLISECONDS = tuple(f".{number:03d}Z" for number in range(1000))
HUGE = 1e15
PLACES: dict[type, str] = {str: '"%s"', int: "%d", float: "%.3f", type(None): "null%.0s"}
"""How a value that needs no escaping is put into a JSON line."""

PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
KEY = re.compile(r"lf_([0-9a-f]{12})_[A-Za-z0-9_-]+")

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class LogConfig(BaseModel):
    """How this program's processes log; Ray and Serve have settings of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


EVERY_EVENT: dict[str, Any] = {
    "levelno": logging.INFO,
    "levelname": "INFO",
    "args": None,
    "relativeCreated": 0.0,
    "lineno": 0,
    **dict.fromkeys(("pathname", "filename", "module", "funcName"), ""),
    **dict.fromkeys(("exc_info", "exc_text", "stack_info")),
    **dict.fromkeys(("thread", "threadName", "process", "processName", "taskName")),
}
"""What a record has that says nothing of an event."""


class EventRecord(logging.LogRecord):
    """A record with fields and without a place in the source, whose search costs as much as the rest."""

    def __init__(self, name: str, message: str, fields: Mapping[str, Any]) -> None:
        at_s = time.time()
        self.__dict__ = EVERY_EVENT.copy()
        self.name, self.msg, self.fields = name, message, fields
        self.created, self.msecs = at_s, at_s % 1 * 1000


def event(logger: logging.Logger, message: str, fields: Mapping[str, Any]) -> None:
    """Log something that happens often, at the level of information."""
    if logger.isEnabledFor(logging.INFO):
        logger.handle(EventRecord(logger.name, message, fields))


class FleetFormatter(logging.Formatter):
    """What both formats share: `role` and `member` say which process speaks."""

    def __init__(self, role: str, member: str) -> None:
        super().__init__()
        self._role = role
        self._member = member
        self._second = 0
        self._prefix = ""

    def _time(self, record: logging.LogRecord) -> str:
        """`2026-11-30T05:00:00.123Z`; the part before the dot is made once a second."""
        second = int(record.created)
        if second != self._second:
            self._second, self._prefix = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return self._prefix + MILLISECONDS[int(record.msecs)]

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[0] is None:
            return ""
        return cut(self.formatException(record.exc_info), MAX_TRACEBACK_CHARS)


class Template(NamedTuple):
    """What lines of one kind have in common, for `%` with time and values, and which values are texts and floats."""

    text: str
    are_texts: tuple[bool, ...]
    are_floats: tuple[bool, ...]


class JsonFormatter(FleetFormatter):
    """One JSON object a record."""

    def __init__(self, role: str, member: str) -> None:
        super().__init__(role, member)
        self._templates: dict[tuple[str, str, tuple[str, ...], tuple[type, ...]], Template] = {}

    def format(self, record: logging.LogRecord) -> str:
        line = self._plain_line(record) if isinstance(record, EventRecord) else None
        return self._any_line(record) if line is None else without_keys(line)

    def _plain_line(self, record: EventRecord) -> str | None:
        """The line of an event with nothing in it that must be escaped or cut, at a fifth of the price; else None."""
        names, values = tuple(record.fields), tuple(record.fields.values())
        key = record.name, record.msg, names, tuple(map(type, values))
        template = self._templates.get(key) or self._template(key)
        texts = tuple(compress(values, template.are_texts))
        together = "".join(texts)
        has_long = len(together) > MAX_VALUE_CHARS and max(map(len, texts)) > MAX_VALUE_CHARS
        sum_of_floats = sum(map(abs, compress(values, template.are_floats)))  # NaN, if one of them is
        if has_long or not sum_of_floats < HUGE or not is_plain(together):
            return None
        return template.text % (self._time(record), *values) if template.text else None

    def _template(self, key: tuple[str, str, tuple[str, ...], tuple[type, ...]]) -> "Template":
        """For all events of one place with these fields of these types; without a text where there cannot be one."""
        name, message, fields, kinds = key
        said = {"level": "info", "role": self._role, "member": self._member, "logger": name}
        said["message"] = cut(message, MAX_MESSAGE_CHARS)
        text = ""
        if HEAD.isdisjoint(fields) and PLACES.keys() >= set(kinds):
            pairs = zip(fields, kinds, strict=True)
            rest = "".join(f",{escaped_percent(_encode(field))}:{PLACES[kind]}" for field, kind in pairs)
            text = f'{{"time":"%s",{escaped_percent(_encode(said)[1:-1])}{rest}}}'
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        are_texts, are_floats = (tuple(kind is wanted for kind in kinds) for wanted in (str, float))
        made = self._templates[key] = Template(text, are_texts, are_floats)
        return made

    def _any_line(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "role": self._role,
            "member": self._member,
            "logger": record.name,
            "message": cut(record.getMessage(), MAX_MESSAGE_CHARS),
        }
        for name, value in fields_of(record).items():
            line.setdefault(name, bounded(value))
        if traceback := self._traceback(record):
            line["traceback"] = traceback
        return without_keys(_encode(line))


class TextFormatter(FleetFormatter):
    """`time LEVEL role message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        message = cut(record.getMessage(), MAX_MESSAGE_CHARS)
        words = [self._time(record), record.levelname, self._role, message]
        words += [f"{name}={shown(value)}" for name, value in fields_of(record).items()]
        lines = self._traceback(record).splitlines()
        return without_keys("\n".join((escaped(" ".join(words)), *(f"| {escaped(line)}" for line in lines))))


class FleetHandler(logging.StreamHandler[Any]):
    """The one handler that `set_up` puts in place."""

    def handle(self, record: logging.LogRecord) -> bool:
        """As the library's, without filters, of which there are none."""
        assert self.lock is not None
        with self.lock:
            self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """As the library's, with fewer questions on the way."""
        try:
            stream = self.stream
            stream.write(self.format(record) + self.terminator)
            stream.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)


def set_up(config: LogConfig, *, role: str, member: str, stream: IO[str] | None = None) -> FleetHandler:
    """Send this program's log to `stream` (by default stderr, which Ray keeps in a file for each process).

    Calling it again replaces what was set up before.
    """
    handler = FleetHandler(stream)
    handler.setFormatter((JsonFormatter if config.format == "json" else TextFormatter)(role, member))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [kept for kept in logger.handlers if not isinstance(kept, FleetHandler)]
        logger.addHandler(handler)
        logger.setLevel(config.level.upper())
        logger.propagate = False
    return handler


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What the record carries besides its message."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def bounded(value: Any) -> Any:
    """Numbers (to a thousandth), true, false and None as they are, everything else as text that is not too long."""
    if type(value) is str and len(value) <= MAX_VALUE_CHARS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(number(value))
    return value if value is None or isinstance(value, int | float) else cut(str(value), MAX_VALUE_CHARS)


def shown(value: Any) -> str:
    """A value in a text line: bare where it is one plain word, else quoted as in JSON."""
    if value is None:
        return "-"
    text = number(value) if isinstance(value, float) else str(bounded(value))
    return text if PLAIN.fullmatch(text) else _encode(text)


def is_plain(text: str) -> bool:
    """Whether JSON has it as it is."""
    return text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


def escaped_percent(text: str) -> str:
    return text.replace("%", "%%")


def number(value: float) -> str:
    """To a thousandth, which is a microsecond in milliseconds; very large ones as they are."""
    return f"{value:.3f}" if abs(value) < HUGE else repr(value)


def cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…({len(text)} characters)"


def escaped(text: str) -> str:
    """The text with everything that could end or restyle a line written out."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def without_keys(line: str) -> str:
    """The line without the secret of any API key of ours that has found its way into it."""
    return KEY.sub(r"lf_\1_***", line) if "lf_" in line else line
