"""Matches requests that moved to this worker with the gateway streams that read their output.

When a group of workers changes to another epoch (configuration), a request may move to another
worker, whose engine adopts and continues it. The engine reports adopted requests; gateways attach
to them. Either may happen first, or never. Pure: time is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.core.logprobs import LogprobRows
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.request import FinishReason
from services.worker.ipc import AdoptedRequest, MovedRequest, RequestTimes

ATTACH_TIMEOUT_S = 10.0
# Maximum number of readers that wait, and of aborts that are remembered.
EXPECTED_MAX = 100_000
ABORTED_MAX = 10_000

R = TypeVar("R")
V = TypeVar("V")
Ending = FinishReason | RefuseRequest | MovedRequest


@dataclass(slots=True)
class UnreadOutput:
    """The output of an adopted request that no gateway reads yet; `times` come with its end."""

    token_ids: list[int]  # all output tokens, including those of earlier workers
    expires_s: float
    ending: Ending | None = None  # how the request ended here, None while it runs
    times: RequestTimes | None = None  # set with the ending, if known
    logprobs: list[LogprobRows] = field(default_factory=list)  # of the last tokens
    prompt_logprobs: LogprobRows | None = None  # sent with the first token
    cached_tokens: int = 0  # sent with the first token


@dataclass(frozen=True, slots=True)
class WaitingReader(Generic[R]):
    """A reader (gateway stream) that waits for a request's tokens from index `from_index` on.

    The request moves here with the configuration of `group_id` at `epoch`. `coalesced`: the reader
    prefers many tokens per event.
    """

    request_id: str
    group_id: str
    epoch: int
    from_index: int
    reader: R
    expires_s: float
    coalesced: bool = False


@dataclass(slots=True)
class Handovers(Generic[R]):
    """Adopted requests without a reader, readers without a request, and aborts before adoption.

    Each entry expires after `timeout_s`. After `match`, an id is in at most one of the three.
    """

    timeout_s: float = ATTACH_TIMEOUT_S
    # All three are ordered by expiry and keyed by request id.
    _adopted: dict[str, UnreadOutput] = field(default_factory=dict)
    _expected: dict[str, WaitingReader[R]] = field(default_factory=dict)
    _aborted: dict[str, float] = field(default_factory=dict)  # expiry of aborts before adoption

    def __len__(self) -> int:
        """Number of adopted and expected requests."""
        return len(self._adopted) + len(self._expected)

    @property
    def adopted_ids(self) -> list[str]:
        """Ids of adopted requests without a reader."""
        return list(self._adopted)

    def adopt(self, adopted: AdoptedRequest, now_s: float) -> bool:
        """Keep an adopted request until a gateway reads it; returns False if it was aborted before.

        A request that returns to this worker replaces its earlier entry.
        """
        if self._aborted.pop(adopted.request_id, None) is not None:
            return False
        self._adopted.pop(adopted.request_id, None)
        self._adopted[adopted.request_id] = UnreadOutput(
            list(adopted.emitted_ids),
            now_s + self.timeout_s,
            logprobs=[adopted.logprobs] if adopted.logprobs is not None else [],
            prompt_logprobs=adopted.prompt_logprobs,
            cached_tokens=adopted.cached_tokens,
        )
        return True

    def expect(self, expected: WaitingReader[R]) -> bool:
        """Add a waiting reader; returns False if the request was aborted or too many readers wait.

        A later reader of a request replaces its earlier reader.
        """
        self._expected.pop(expected.request_id, None)
        if expected.request_id in self._aborted or len(self._expected) >= EXPECTED_MAX:
            return False
        unread = self._adopted.get(expected.request_id)
        ending = unread.ending if unread is not None else None
        # The request may have been here before and moved away. That earlier move must not redirect
        # a reader that waits for its return at a later epoch.
        if isinstance(ending, MovedRequest) and ending.epoch <= expected.epoch:
            del self._adopted[expected.request_id]
        self._expected[expected.request_id] = expected
        return True

    def match(self, request_id: str) -> tuple[UnreadOutput, WaitingReader[R]] | None:
        """Remove and return a request and its reader; None while either is missing."""
        if request_id not in self._adopted or request_id not in self._expected:
            return None
        return self._adopted.pop(request_id), self._expected.pop(request_id)

    def add_token(self, token: EmitToken, times: RequestTimes | None = None) -> None:
        """Keep a token of an adopted request; no effect for others. The last token has `times`."""
        unread = self._adopted.get(token.request_id)
        if unread is not None and unread.ending is None:
            # Another index is a bug of the engine: skip the token, so that the gateway detects a
            # gap.
            if token.index == len(unread.token_ids):
                unread.token_ids.append(token.token_id)
                if token.logprobs is not None:
                    unread.logprobs.append(token.logprobs)
                if token.prompt_logprobs is not None:
                    unread.prompt_logprobs = token.prompt_logprobs
            unread.ending = token.finish_reason
            unread.times = times

    def end(self, ending: RefuseRequest | MovedRequest, times: RequestTimes | None = None) -> bool:
        """Record the end of an unread request on this worker; returns False for other requests."""
        unread = self._adopted.get(ending.request_id)
        if unread is None:
            return False
        if unread.ending is None:
            unread.ending = ending
            unread.times = times
        return True

    def abort(self, request_id: str, now_s: float) -> UnreadOutput | None:
        """Remove and return an unread request; if there is none, remember the abort."""
        unread = self.forget(request_id)
        if unread is None:
            self._remember(request_id, now_s)
        return unread

    def forget(self, request_id: str) -> UnreadOutput | None:
        """Remove all entries of an id; returns its unread output, if any."""
        self._expected.pop(request_id, None)
        self._aborted.pop(request_id, None)
        return self._adopted.pop(request_id, None)

    def expected_by(self, reader: R) -> list[str]:
        """Ids of the requests that `reader` waits for."""
        return [e.request_id for e in self._expected.values() if e.reader is reader]

    def clear(self) -> list[WaitingReader[R]]:
        """Remove all entries; returns the readers that waited."""
        waiting = list(self._expected.values())
        for parts in (self._adopted, self._expected, self._aborted):
            parts.clear()
        return waiting

    def expire(self, now_s: float) -> tuple[list[str], list[WaitingReader[R]]]:
        """Remove expired entries; returns the ids to abort in the engine, and expired readers."""
        overdue = _take_while(self._adopted, lambda unread: unread.expires_s <= now_s)
        running = [request_id for request_id, a in overdue.items() if a.ending is None]
        for request_id in running:
            self._remember(request_id, now_s)
        timed_out = _take_while(self._expected, lambda expected: expected.expires_s <= now_s)
        _take_while(self._aborted, lambda expires_s: expires_s <= now_s)
        return running, list(timed_out.values())

    def _remember(self, request_id: str, now_s: float) -> None:
        """Remember that a request was aborted."""
        if len(self._aborted) >= ABORTED_MAX:
            del self._aborted[next(iter(self._aborted))]
        self._aborted[request_id] = now_s + self.timeout_s

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts contradict each other; call it after `match`."""
        parts = [set(self._adopted), set(self._expected), set(self._aborted)]
        assert sum(map(len, parts)) == len(set.union(*parts))
        assert len(self._expected) <= EXPECTED_MAX and len(self._aborted) <= ABORTED_MAX
        for deadlines in (
            [unread.expires_s for unread in self._adopted.values()],
            [expected.expires_s for expected in self._expected.values()],
            list(self._aborted.values()),
        ):
            assert deadlines == sorted(deadlines)


def _take_while(entries: dict[str, V], overdue: Callable[[V], bool]) -> dict[str, V]:
    """Remove and return the entries at the front for which `overdue` holds."""
    taken: dict[str, V] = {}
    while entries and overdue(entries[first := next(iter(entries))]):
        taken[first] = entries.pop(first)
    return taken
