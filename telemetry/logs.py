"""Log lines as text for people or as JSON for machines, through the standard library's logging.

Any code logs as usual; `logger.info("request", extra={"fields": {...}})` adds fields. Whatever they hold, a record is
one line (a traceback's further lines begin with `|`), values are cut, and an API key is blacked out.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict

LOGGERS = ("lorafleet", "cluster", "registry", "replica", "router", "telemetry")
"""The roots of this program's loggers; those of libraries are left alone."""

MAX_VALUE_CHARS = 256
MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 16_000
PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
KEY = re.compile(r"lf_([0-9a-f]{12})_[A-Za-z0-9_-]+")

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class LogConfig(BaseModel):
    """How this program's processes log; Ray and Serve have settings of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class EventRecord(logging.LogRecord):
    """A record with fields and without a place in the source, whose search costs as much as the rest."""

    def __init__(self, name: str, level: int, message: str, fields: Mapping[str, Any]) -> None:
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.msg, self.args = message, None
        self.fields = fields
        self.created = time.time()
        self.msecs = self.created % 1 * 1000
        self.relativeCreated, self.lineno = 0.0, 0
        self.pathname = self.filename = self.module = self.funcName = ""
        self.exc_info = self.exc_text = self.stack_info = None
        self.thread = self.threadName = self.process = self.processName = self.taskName = None


def event(logger: logging.Logger, message: str, fields: Mapping[str, Any]) -> None:
    """Log something that happens often, at the level of information."""
    if logger.isEnabledFor(logging.INFO):
        logger.handle(EventRecord(logger.name, logging.INFO, message, fields))


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
        return f"{self._prefix}.{int(record.msecs):03d}Z"

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[0] is None:
            return ""
        return cut(self.formatException(record.exc_info), MAX_TRACEBACK_CHARS)


class JsonFormatter(FleetFormatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
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
    """Numbers, true, false and None as they are, everything else as text that is not too long."""
    if type(value) is str and len(value) <= MAX_VALUE_CHARS:
        return value
    return value if value is None or isinstance(value, int | float) else cut(str(value), MAX_VALUE_CHARS)


def shown(value: Any) -> str:
    """A value in a text line: bare where it is one plain word, else quoted as in JSON."""
    if value is None:
        return "-"
    text = str(bounded(value))
    return text if PLAIN.fullmatch(text) else _encode(text)


def cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…({len(text)} characters)"


def escaped(text: str) -> str:
    """The text with everything that could end or restyle a line written out."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def without_keys(line: str) -> str:
    """The line without the secret of any API key of ours that has found its way into it."""
    return KEY.sub(r"lf_\1_***", line) if "lf_" in line else line
