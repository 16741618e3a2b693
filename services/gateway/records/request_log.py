"""Writes the access log: a line per finished request, rate-limited for refused requests."""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

from services.common.clock import monotonic_s
from services.common.logging import FIELDS
from services.common.tracing import RateLimit
from services.gateway.records.request_record import RequestRecord
from services.gateway.vocabulary.errors import Unauthorized

REFUSALS_PER_S = 10
"""Log lines per second for each kind of refusal."""
# Platforms probe these routes every few seconds, so they are logged at level debug.
QUIET_ROUTES = frozenset({"/live", "/ready", "/health", "/load", "/metrics", "/ping"})

log = logging.getLogger(__name__)


class _Kind(Enum):
    """Kinds of refusals. Each has its own rate limit, so that many of one kind hide no others."""

    FAILED = "failed"
    NO_KEY = "no key"
    OTHER = "other"


class RequestLog:
    """Writes the access log. A refusal is a request that failed before its first token."""

    def __init__(self, later: Callable[[float, Callable[[], None]], object] | None = None) -> None:
        """`later(delay_s, callback)` schedules a callback; default: the running loop."""
        self._later = later
        self._limits = {kind: RateLimit(REFUSALS_PER_S) for kind in _Kind}
        self._left_out = 0

    def write(self, record: RequestRecord) -> None:
        """Log a finished request, or count it as left out by the rate limit."""
        refused = record.status >= 400 and record.first_token_s is None
        quiet = record.endpoint in QUIET_ROUTES
        if refused and not quiet and not self._limits[_kind_of(record.status)].take(monotonic_s()):
            self._leave_out()
            return
        level = logging.DEBUG if quiet else logging.INFO
        if log.isEnabledFor(level):
            message = f"{record.endpoint} {record.status}"
            log.log(level, message, extra={FIELDS: fields_of(record)})

    def _leave_out(self) -> None:
        self._left_out += 1
        # Report the number of left-out lines at most once per second.
        if self._left_out == 1:
            later = self._later or asyncio.get_running_loop().call_later
            later(1.0, self._log_left_out)

    def _log_left_out(self) -> None:
        left_out, self._left_out = self._left_out, 0
        log.info("refused requests left out of the log", extra={FIELDS: {"left_out": left_out}})


def _kind_of(status: int) -> _Kind:
    if status >= 500:
        return _Kind.FAILED
    return _Kind.NO_KEY if status == Unauthorized.status else _Kind.OTHER


def fields_of(record: RequestRecord) -> dict[str, Any]:
    """The fields of the log line except ids, without unknown fields. Times in seconds."""
    first = record.choices[0] if record.choices else None
    segments = first.segments if first is not None else []
    fields = {
        "endpoint": record.endpoint,
        "status": record.status,
        "grpc_code": record.grpc_code,
        "code": record.code,
        "owner": record.principal.owner or None,
        "model": record.model,
        "response_id": record.response_id if record.has_client_id else None,
        "prompt_tokens": record.prompt_tokens or None,
        "output_tokens": record.output_tokens if record.prompt_tokens else None,
        "queue_s": first and _rounded(first.queue_s),
        "ttft_s": record.first_token_s and _rounded(record.first_token_s - record.began_s),
        "total_s": _rounded(record.ended_s - record.began_s),
        "worker": segments[-1].worker_id if segments else None,
        "moved": sum(len(choice.moves) for choice in record.choices) if segments else None,
        "resumed": sum(choice.resumed for choice in record.choices) or None,
        "finish_reason": ",".join(record.finish_reasons) or None,
        "replayed": record.replayed or None,
        "retry_after_s": record.retry_after_s,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
