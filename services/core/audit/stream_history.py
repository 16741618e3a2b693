"""History of a gateway process from its log: requests, and the tokens sent to clients."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.core.audit.facts import SegmentRead, StreamEnded, StreamOpened, TokensForwarded
from services.core.audit.record import Findings, Recorded

KILLED = "killed"
"""Outcome of a request whose gateway was killed before it could log the end."""


@dataclass(slots=True)
class AuditedStream:
    """A request at its gateway."""

    tokens_max: int
    token_ids: list[int] = field(default_factory=list)
    segments: list[SegmentRead] = field(default_factory=list)
    outcome: str = ""

    @property
    def workers_known(self) -> bool:
        """Whether the gateway logged the workers of the tokens, which it does at the end."""
        return self.outcome != KILLED or bool(self.segments)

    def sources(self) -> Iterator[tuple[int, int, frozenset[str] | None]]:
        """Each segment's first index, end index, and the workers that may have emitted its tokens.

        The workers are None if they are not known; then any worker's tokens are accepted.
        """
        if not self.workers_known:
            yield 0, len(self.token_ids), None
        workers: frozenset[str] = frozenset()
        ends = [*(segment.first_index for segment in self.segments[1:]), len(self.token_ids)]
        for segment, end in zip(self.segments, ends, strict=False):
            # After a hand-over, the new worker also sends tokens that the previous one emitted.
            own = frozenset({segment.worker_id})
            workers = workers | own if segment.moved else own
            yield segment.first_index, min(end, len(self.token_ids)), workers


@dataclass(slots=True)
class StreamHistory:
    """The streams of a gateway, by request id."""

    findings: Findings
    streams: dict[str, AuditedStream] = field(default_factory=dict)

    def read(self, entries: Iterable[Recorded], killed: bool = False) -> None:
        """Read all entries of the log, in order; a `killed` gateway need not end its requests."""
        for entry in entries:
            match entry.value:
                case StreamOpened() as opened:
                    self._note_opened(opened)
                case TokensForwarded() as tokens:
                    self._note_tokens(tokens)
                case SegmentRead() as segment:
                    self._note_segment(segment)
                case StreamEnded() as ended:
                    self._note_ended(ended)
        for stream in self.streams.values() if killed else ():
            stream.outcome = stream.outcome or KILLED
        for request_id, stream in self.streams.items():
            self.findings.check(
                "I10", stream.outcome != "", "{} was admitted and never ended", request_id
            )

    def _note_opened(self, fact: StreamOpened) -> None:
        self.findings.check(
            "I10",
            fact.request_id not in self.streams,
            "two requests were admitted as {}",
            fact.request_id,
        )
        self.streams[fact.request_id] = AuditedStream(fact.tokens_max)

    def _note_tokens(self, fact: TokensForwarded) -> None:
        stream = self.streams.get(fact.request_id)
        if stream is None or stream.outcome:
            self.findings.check(
                "I8", False, "{} received token {} after its end", fact.request_id, fact.first_index
            )
            return
        self.findings.check(
            "I8",
            fact.first_index == len(stream.token_ids),
            "{} received token {}, but {} was next",
            *(fact.request_id, fact.first_index, len(stream.token_ids)),
        )
        stream.token_ids += fact.token_ids

    def _note_segment(self, fact: SegmentRead) -> None:
        stream = self.streams.get(fact.request_id)
        if stream is None:
            return
        before = stream.segments[-1].first_index if stream.segments else 0
        # The worker of a moved request may have emitted more tokens than the client received.
        sent = fact.moved or fact.first_index <= len(stream.token_ids)
        within = before <= fact.first_index and sent
        self.findings.check(
            "I5",
            within and (bool(stream.segments) or fact.first_index == 0),
            "{} continued at {} with token {}, after a segment from {} on and {} tokens in all",
            *(fact.request_id, fact.worker_id, fact.first_index, before, len(stream.token_ids)),
        )
        stream.segments.append(fact)

    def _note_ended(self, fact: StreamEnded) -> None:
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
