"""Log formats of the services, with the id of the current request in each line.

A log line never contains a prompt, an output or a key. So of an exception during a request only
type and code locations are logged, because its message may quote such contents.
"""

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

FIELDS = "fields"
"""Key of `extra` for additional fields: `log.info("…", extra={FIELDS: {"worker": "w0"}})`."""

CHAIN_MAX = 8
"""Maximum number of chained causes of an exception that are logged."""

# Characters to escape: C0 and C1 control characters, which terminals interpret, and Unicode's line
# separators. A line break in a message would look like another log line.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ESCAPED = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _CONTROLS}

_NO_IDS: Mapping[str, str] = {}
_ids: ContextVar[Mapping[str, str]] = ContextVar("ids", default=_NO_IDS)


class LogStats:
    """Counts of the log of this process."""

    lost_lines = 0
    """Lines that could not be written, because the disk was full."""


stats = LogStats()


class _Handler(logging.StreamHandler[TextIO]):
    """Drops lines that cannot be written, and counts them."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), OSError):
            stats.lost_lines += 1
        else:
            super().handleError(record)


def set_up_logging(level: str = "info", form: str = "json") -> None:
    """Log to standard error from `level` up, as "json" or "text"; replaces earlier handlers."""
    handler = _Handler(sys.stderr)
    handler.setFormatter({"json": JsonFormatter, "text": TextFormatter}[form]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextlib.contextmanager
def request_ids(request_id: str, trace_id: str) -> Iterator[None]:
    """Add the ids to the log lines of this task; an empty trace id is omitted."""
    ids = {"request_id": request_id}
    token = _ids.set(ids | {"trace_id": trace_id} if trace_id else ids)
    try:
        yield
    finally:
        _ids.reset(token)


class _Formatter(logging.Formatter):
    """Omits messages of exceptions during a request, since they may quote its contents."""

    def formatException(self, ei: Any) -> str:
        if not _ids.get() or ei[1] is None:
            return super().formatException(ei)
        return "\n".join(_code_locations(ei[1], CHAIN_MAX))


def _code_locations(error: BaseException, chain_max: int) -> Iterator[str]:
    """Types and tracebacks of an exception and its causes, causes first."""
    if chain_max > 0:
        hidden = error.__suppress_context__
        before = error.__cause__ or (None if hidden else error.__context__)
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        # Causes first, as in Python's own tracebacks.
        for other in (before, *inner):
            if other is not None:
                yield from _code_locations(other, chain_max - 1)
    yield "Traceback (most recent call last):"
    yield from (part.rstrip("\n") for part in traceback.format_tb(error.__traceback__))
    yield f"{type(error).__module__}.{type(error).__qualname__}"


class JsonFormatter(_Formatter):
    """A JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; an exception is its last field."""
        row = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)


class TextFormatter(_Formatter):
    """Time, level, logger, message and further fields; an exception on the lines that follow."""

    def format(self, record: logging.LogRecord) -> str:
        """The line or lines of a record."""
        more = [f"{name}={_plain(value)}" for name, value in _fields(record).items()]
        head = f"{_time(record)} {record.levelname.lower():7} {record.name}:"
        line = " ".join([head, record.getMessage().translate(_ESCAPED), *more])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _time(record: logging.LogRecord) -> str:
    """The time in UTC with milliseconds, such as 2026-01-31T23:59:59.123Z."""
    stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return stamp.removesuffix("+00:00") + "Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {**_ids.get(), **getattr(record, FIELDS, {})}


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text)
