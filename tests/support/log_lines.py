"""Captures this process's log in the format of services."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.common.logging import JsonFormatter


class LogLines(logging.Handler):
    """All log lines, except of loggers whose names begin with a prefix in `ignored`."""

    def __init__(self, ignored: tuple[str, ...]) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []
        self.addFilter(lambda record: not record.name.startswith(ignored))

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def requests(self, endpoint: str) -> list[dict[str, Any]]:
        """The access lines of a route."""
        return [row for row in map(json.loads, self.lines) if row.get("endpoint") == endpoint]


@contextmanager
def log_lines(*ignored: str) -> Iterator[LogLines]:
    """Capture log lines of every level during the body."""
    handler, root = LogLines(ignored), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
