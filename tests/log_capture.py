"""The log of a test as it would be written, and loggers as they were afterwards."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from telemetry.logs import LOGGERS, LogConfig, set_up


class CapturedLog:
    """What was written so far."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line, which must be one JSON object each."""
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["message"] == message]


@contextmanager
def captured_log(
    log_format: Literal["text", "json"] = "json", level: Literal["debug", "info", "warning"] = "info"
) -> Iterator[CapturedLog]:
    """This program's log while the block runs."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    log = CapturedLog()
    set_up(LogConfig(format=log_format, level=level), role="test", member="m-1", stream=log.stream)
    try:
        yield log
    finally:
        for logger, handlers, was_level, propagates in before:
            logger.handlers, logger.propagate = handlers, propagates
            logger.setLevel(was_level)
