"""Writes the log of `serve`: text, or JSON lines with the id of the request that they belong to.

Invariant: a log that cannot be written costs lines, never a request: `LogHandler` counts what a full disk swallows.
"""

import json
import logging
import sys
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, what `extra` brings, exception."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time.replace("+00:00", "Z"), "level": record.levelname.lower()}
        line |= {"logger": record.name, "message": record.getMessage()}
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        line |= {name: value for name, value in vars(record).items() if name not in RESERVED}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogHandler(logging.StreamHandler[Any]):
    """Writes to stderr. Counts lines that cannot be written (a full disk, a closed pipe) in `num_lost`; the next line
    that can be written says how many there were."""

    num_lost = 0

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._reported = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self.num_lost
        super().emit(record)
        if self.num_lost == before and before > self._reported:
            lost = before - self._reported
            self._reported = before
            text = "%d lines of the log could not be written"
            level = logging.WARNING
            super().emit(logging.LogRecord(__name__, level, __file__, 0, text, (lost,), None))

    def handleError(self, record: logging.LogRecord) -> None:
        """Called in an `except` clause."""
        if isinstance(sys.exception(), OSError | ValueError):  # ValueError: the stream is closed
            self.num_lost += 1
        else:
            super().handleError(record)


def configure(log_format: str, *, level: int = logging.WARNING) -> LogHandler:
    """Sets the format of the root logger. `level`: that of the package's loggers; INFO with JSON lines."""
    handler = LogHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter("%(message)s"))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LogHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    if log_format == "json":
        logging.captureWarnings(True)
        level = logging.INFO
    logging.getLogger("slipstream").setLevel(level)
    return handler


def say(text: str) -> None:
    """Prints to stdout where that is possible: a full disk must not end the server."""
    try:
        print(text, flush=True)
    except OSError as error:
        logging.getLogger(__name__).warning("stdout cannot be written: %s", error.strerror)


def report(error: str, log_format: str) -> None:
    """Reports the error that ends the server."""
    if log_format == "json":
        logging.getLogger(__name__).error(error)
        return
    with suppress(OSError):
        print(error, file=sys.stderr)


def release_streams() -> None:
    """Flushes stdout and stderr for the last time, so that the interpreter does not fail where they cannot be
    written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # None: it was closed before the server began
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            setattr(sys, name, None)
