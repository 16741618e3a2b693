"""Event logs of a simulated world, and their audit for requests."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.core.audit.audit import Audit
from services.core.audit.facts import (
    EngineStarted,
    EngineSwitched,
    SegmentRead,
    StreamEnded,
    StreamOpened,
    TokensForwarded,
)
from services.core.audit.record import FACT, Findings
from services.core.changeover.configuration import Configuration

AUDITED = ("I5", "I8", "I10", "I15")
"""Invariants of requests; others need logs of memory managers and of memory."""


class LogLine(NamedTuple):
    """An entry of a log."""

    kind: str
    value: Any


class RequestFindings(Findings):
    """Findings about requests only."""

    def check(self, invariant: str, holds: bool, sentence: str, *parts: object) -> None:
        if invariant in AUDITED:
            super().check(invariant, holds, sentence, *parts)


@dataclass
class RequestLogs:
    """The logs of engines, by worker, and of a gateway with all streams."""

    engines: dict[str, list[LogLine]] = field(default_factory=lambda: defaultdict(list))
    gateway: list[LogLine] = field(default_factory=list)
    segments: dict[str, list[SegmentRead]] = field(default_factory=dict)  # by request
    forwarded: dict[str, int] = field(default_factory=dict)  # tokens, by request

    def log(self, worker_id: str, kind: str, value: Any) -> None:
        """An engine logs an event, a command or a plan."""
        self.engines[worker_id].append(LogLine(kind, value))

    def start_engine(self, worker_id: str, num_layers: int) -> None:
        """An engine begins."""
        started = EngineStarted(0.0, worker_id, f"{worker_id}-1", "m", num_layers, 0, exact=True)
        self.log(worker_id, FACT, started)

    def switch(self, now_s: float, worker_id: str, new: Configuration) -> None:
        """An engine has switched to a configuration."""
        fact = EngineSwitched(now_s, new.own.group_id, new.epoch, new.stages)
        self.log(worker_id, FACT, fact)

    def open(self, request_id: str, tokens_max: int) -> None:
        """A gateway admits a request."""
        self.gateway.append(LogLine(FACT, StreamOpened(0.0, request_id, tokens_max)))
        self.segments[request_id], self.forwarded[request_id] = [], 0

    def read_from(self, request_id: str, worker_id: str, *, moved: bool) -> None:
        """A gateway reads further tokens from another worker."""
        first = self.forwarded[request_id]
        self.segments[request_id].append(SegmentRead(request_id, first, worker_id, moved))

    def note_returned(self, request_id: str) -> None:
        """The worker that a gateway reads from has returned the request."""
        *before, last = self.segments[request_id]
        returned = SegmentRead(
            *(request_id, last.first_index, last.worker_id, last.moved), returned=True
        )
        self.segments[request_id] = [*before, returned]

    def forward(self, request_id: str, tokens: list[int]) -> None:
        """A gateway has received these tokens of a stream."""
        first = self.forwarded[request_id]
        if new := tuple(tokens[first:]):
            self.gateway.append(LogLine(FACT, TokensForwarded(request_id, first, new)))
            self.forwarded[request_id] = len(tokens)

    def end(self, request_id: str, outcome: str) -> None:
        """A gateway ends a stream."""
        self.gateway += [LogLine(FACT, segment) for segment in self.segments.pop(request_id)]
        self.gateway.append(LogLine(FACT, StreamEnded(0.0, request_id, outcome)))

    def audit(self) -> Findings:
        """End all open streams, and audit all logs."""
        for request_id in list(self.segments):
            self.end(request_id, "abandoned")
        audit = Audit(findings=RequestFindings())
        return audit.run(list(self.engines.values()), [], [self.gateway])
