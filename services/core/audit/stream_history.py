"""History of a gateway process from its event log: requests, and the tokens sent to clients.

Part of an audit: it checks invariants while it reads the log, and `Audit` compares the result with
the engines' logs. A *segment* is a run of tokens that the gateway read from one worker. A *moved*
segment continues a sequence that the previous worker handed over, with its tokens. Invariants (all
in `audit.py`): I5, each segment continues the client's stream without a gap; I8, a client receives
tokens 0, 1, 2, … until the end of the stream; I10, each request ends exactly once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from services.core.audit.facts import SegmentRead, StreamEnded, StreamOpened, TokensForwarded
from services.core.audit.record import Findings, Recorded

KILLED = "killed"
"""Outcome of a request whose gateway was killed before it could log the end."""


@dataclass(slots=True)
class AuditedStream:
    """A request at its gateway."""

    tokens_max: int  # limit of output tokens
    earlier: int = 0  # output tokens of an earlier run, after which the request began
    token_ids: list[int] = field(default_factory=list)  # that the client received
    segments: list[SegmentRead] = field(default_factory=list)  # logged at the end of the request
    outcome: str = ""  # as in `StreamEnded`, or `KILLED`; "" before the end

    @property
    def workers_known(self) -> bool:
        """Whether the gateway logged the segments, which it does at the end of the request."""
        return self.outcome != KILLED or bool(self.segments)

    @property
    def lost_workers(self) -> frozenset[str]:
        """Workers that had not returned the request when the gateway restarted it elsewhere."""
        return frozenset(
            last.worker_id
            for last, after in pairwise(self.segments)
            if not (last.returned or after.moved)
        )

    def sources(self) -> Iterator[tuple[int, int, frozenset[str] | None]]:
        """Each segment's first index, end index, and the workers that may have emitted its tokens.

        The workers are None if the gateway did not log them.
        """
        if not self.workers_known:
            yield 0, len(self.token_ids), None
        workers: frozenset[str] = frozenset()
        ends = [*(segment.first_index for segment in self.segments[1:]), len(self.token_ids)]
        for segment, end in zip(self.segments, ends, strict=False):
            # The worker of a moved segment also sends tokens that earlier workers emitted.
            own = frozenset({segment.worker_id})
            workers = workers | own if segment.moved else own
            yield segment.first_index, min(end, len(self.token_ids)), workers


@dataclass(slots=True)
class StreamHistory:
    """The streams of a gateway, by request id."""

    findings: Findings
    streams: dict[str, AuditedStream] = field(default_factory=dict)

    def read(self, entries: Iterable[Recorded], killed: bool = False) -> None:
        """Read and check all entries; open requests of a `killed` gateway end as `KILLED`."""
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

    def _note_opened(self, opened: StreamOpened) -> None:
        self.findings.check(
            "I10",
            opened.request_id not in self.streams,
            "two requests were admitted as {}",
            opened.request_id,
        )
        self.streams[opened.request_id] = AuditedStream(opened.tokens_max, opened.earlier)

    def _note_tokens(self, tokens: TokensForwarded) -> None:
        stream = self.streams.get(tokens.request_id)
        # A request that was never opened counts as ended.
        if stream is None or stream.outcome:
            self.findings.check(
                "I8",
                False,
                "{} received token {} after its end",
                *(tokens.request_id, tokens.first_index),
            )
            return
        self.findings.check(
            "I8",
            tokens.first_index == len(stream.token_ids),
            "{} received token {}, but {} was next",
            *(tokens.request_id, tokens.first_index, len(stream.token_ids)),
        )
        stream.token_ids += tokens.token_ids

    def _note_segment(self, segment: SegmentRead) -> None:
        stream = self.streams.get(segment.request_id)
        if stream is None:
            return
        before = stream.segments[-1].first_index if stream.segments else 0
        # The previous worker of a moved segment may have emitted more tokens than were sent.
        sent = segment.moved or segment.first_index <= len(stream.token_ids)
        within = before <= segment.first_index and sent
        self.findings.check(
            "I5",
            within and (bool(stream.segments) or segment.first_index == stream.earlier),
            "{}: the segment of {} starts at token {}; the previous starts at {}, and the client"
            " received {} tokens",
            *(segment.request_id, segment.worker_id, segment.first_index),
            *(before, len(stream.token_ids)),
        )
        stream.segments.append(segment)

    def _note_ended(self, ended: StreamEnded) -> None:
        stream = self.streams.get(ended.request_id)
        if stream is None or stream.outcome:
            self.findings.check("I10", False, "{} ended twice", ended.request_id)
            return
        stream.outcome = ended.outcome
        count = len(stream.token_ids)
        self.findings.check(
            "I8",
            count <= stream.tokens_max
            and (ended.outcome != "length" or count == stream.tokens_max),
            "{} ended ({}) with {} of {} tokens",
            *(ended.request_id, ended.outcome, count, stream.tokens_max),
        )
