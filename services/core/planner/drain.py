"""Decides which requests a worker that shuts down returns to the scheduler, and when.

Their gateways resume them at other workers, which compute the KV again. (Requests whose KV is
shipped are no candidates.) Requests without KV and batch requests return at once. Running requests
run on until they return, newest first, at a pace that bounds the recomputation in other groups. A
request for which no other group has room stays and runs to its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from services.core.planner.sequence import Phase, Sequence
from services.core.report import OtherRoom
from services.core.request import Request

ITERATIONS_PER_S = 2
"""Full iterations per second that other groups, each, may spend on prompts of returned requests."""
RETURNS_S = 5.0
"""Seconds within which all running requests return if other groups have room; a slower pace is
raised."""
CREDIT_S = 0.5
"""Seconds for which an unused pace accumulates."""
MOVE_INTERVAL_S = 2.0
"""Seconds for which a request that has run at another worker stays here, so that it progresses."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request of the worker that shuts down; `seq_id` as in `sequence_ids.py`.

    `tokens`: number of tokens so far, prompt and output. `holds_kv`: whether it runs. `arrived_s`:
    time of its arrival at this worker.
    """

    seq_id: str
    request: Request
    tokens: int
    holds_kv: bool
    arrived_s: float

    @classmethod
    def of(cls, sequence: Sequence) -> "Candidate":
        """The candidate of a planner's sequence."""
        return cls(
            sequence.seq_id,
            sequence.request,
            len(sequence.token_ids),
            sequence.phase is Phase.RUNNING,
            sequence.arrival_s,
        )

    @property
    def tokens_max(self) -> int:
        """Longest sequence that the request may become, in tokens."""
        return len(self.request.prompt_ids) + self.request.limits.max_tokens

    @property
    def has_output(self) -> bool:
        """Whether the request has output tokens, here or from earlier workers."""
        return self.tokens > len(self.request.prompt_ids)

    @property
    def is_paced(self) -> bool:
        """Whether it returns at the limited pace, not at once."""
        return self.holds_kv and self.request.service.online

    def may_return(self, now_s: float) -> bool:
        """Whether the request's gateway can resume it, and it has not just moved here."""
        request = self.request
        if not (request.resumable or (request.returnable and not self.has_output)):
            return False
        return not request.output_ids or now_s - self.arrived_s >= MOVE_INTERVAL_S


@dataclass(slots=True)
class DrainPace:
    """Chooses the requests that return; `iteration_tokens` is the limit of an iteration."""

    iteration_tokens: int
    _began_s: float = inf  # time of the first call with room elsewhere
    _last_s: float = -inf  # time of the last call
    _credit: float = 0.0  # tokens that may return now; below 0 after a long request

    def choose(
        self, candidates: Iterable[Candidate], room: OtherRoom, now_s: float
    ) -> list[Candidate]:
        """The requests that return at `now_s`, given the room in the other groups."""
        fitting = [
            candidate
            for candidate in candidates
            if candidate.may_return(now_s) and candidate.tokens_max <= room.longest_tokens
        ]
        chosen = [candidate for candidate in fitting if not candidate.is_paced]
        paced = [candidate for candidate in fitting if candidate.is_paced]
        self._add_credit(sum(entry.tokens for entry in paced), len(room.group_tokens), now_s)
        rooms = sorted(room.group_tokens)
        for candidate in sorted(paced, key=lambda entry: (-entry.arrived_s, entry.seq_id)):
            if self._credit <= 0 or not rooms:
                break
            # As the scheduler does, spread the requests: the group with the most room is next.
            if candidate.tokens <= rooms[-1]:
                rooms[-1] -= candidate.tokens
                rooms.sort()
                self._credit -= candidate.tokens
                chosen.append(candidate)
        return chosen

    def _add_credit(self, tokens: int, groups: int, now_s: float) -> None:
        """Add the credit since the last call.

        `tokens`: number of tokens of the running requests. `groups`: number of groups with room.
        """
        passed_s = min(now_s - self._last_s, CREDIT_S)
        self._last_s = now_s
        if groups:
            self._began_s = min(self._began_s, now_s)
        left_s = max(self._began_s + RETURNS_S - now_s, CREDIT_S)
        per_s = max(ITERATIONS_PER_S * self.iteration_tokens * groups, tokens / left_s)
        if groups:
            self._credit = min(self._credit + per_s * passed_s, per_s * CREDIT_S)
