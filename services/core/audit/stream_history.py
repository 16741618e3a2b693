"""History of one gateway process, from its log: requests, and the tokens that clients got."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.audit.facts import StreamEnded, StreamOpened, TokensForwarded
from services.core.audit.findings import Findings
from services.core.audit.record import Recorded


@dataclass(slots=True)
class AuditedStream:
    """A request at its gateway."""

    tokens_max: int
    token_ids: list[int] = field(default_factory=list)
    outcome: str = ""


@dataclass(slots=True)
class StreamHistory:
    """All streams of one gateway by request id."""

    findings: Findings
    streams: dict[str, AuditedStream] = field(default_factory=dict)

    def read(self, entries: Iterable[Recorded]) -> None:
        """Take all entries of the log, in order."""
        for entry in entries:
            match entry.value:
                case StreamOpened() as opened:
                    self._open(opened)
                case TokensForwarded() as tokens:
                    self._forward(tokens)
                case StreamEnded() as ended:
                    self._end(ended)
        for request_id, stream in self.streams.items():
            self.findings.check(
                "I10", stream.outcome != "", "{} was admitted and never ended", request_id
            )

    def _open(self, fact: StreamOpened) -> None:
        self.findings.check(
            "I10",
            fact.request_id not in self.streams,
            "two requests were admitted as {}",
            fact.request_id,
        )
        self.streams[fact.request_id] = AuditedStream(fact.tokens_max)

    def _forward(self, fact: TokensForwarded) -> None:
        stream = self.streams.get(fact.request_id)
        if stream is None or stream.outcome:
            self.findings.check(
                "I8", False, "{} got token {} while it was over", fact.request_id, fact.first_index
            )
            return
        self.findings.check(
            "I8",
            fact.first_index == len(stream.token_ids),
            "{} got token {}, but {} was next",
            *(fact.request_id, fact.first_index, len(stream.token_ids)),
        )
        stream.token_ids += fact.token_ids

    def _end(self, fact: StreamEnded) -> None:
        stream = self.streams.get(fact.request_id)
        if stream is None or stream.outcome:
            self.findings.check("I10", False, "{} ended twice", fact.request_id)
            return
        stream.outcome = fact.outcome
        count = len(stream.token_ids)
        self.findings.check(
            "I8",
            count <= stream.tokens_max and (fact.outcome != "length" or count == stream.tokens_max),
            "{} ended ({}) with {} of {} tokens",
            *(fact.request_id, fact.outcome, count, stream.tokens_max),
        )
