"""Endings of disturbed requests, compared with an undisturbed run of the same requests. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

COMPLETED, LOST, DUPLICATED, STUCK, DIFFERENT = KINDS = (
    *("completed", "lost", "duplicated", "stuck", "different"),
)
OTHERWISE = (*KINDS[1:], "refused", "hung_up")
REFUSALS = (429, 503)
ERRORS_MAX = 10


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The answer of an undisturbed run; `times_s` of its tokens, `prompt_tokens` of its usage."""

    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    times_s: tuple[float, ...] = ()

    def contradiction(self, token_ids: Sequence[int], text: str) -> str:
        """How the received part of another run differs; "" if it does not."""
        for index, (got, wanted) in enumerate(zip(token_ids, self.token_ids, strict=False)):
            if got != wanted:
                return f"token {index} is {got}, not {wanted}"
        return "" if self.text.startswith(text) else "the text differs"

    def wrong_end(self, outcome: "StreamOutcome") -> str:
        """How another run that ended with all its tokens differs; "" if it does not."""
        completion_tokens = outcome.completion_tokens
        if completion_tokens != (wanted := len(self.token_ids)):
            return f"usage has {completion_tokens} completion tokens, not {wanted}"
        if outcome.prompt_tokens != self.prompt_tokens:
            return f"usage has {outcome.prompt_tokens} prompt tokens, not {self.prompt_tokens}"
        if outcome.finish_reason != self.finish_reason:
            return f"the finish reason is '{outcome.finish_reason}', not '{self.finish_reason}'"
        return "" if outcome.text == self.text else "the text differs"


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """Outcome of a stream. `failure`: the error or cause instead of a regular end, "" if none.

    `times_s` (of its tokens), `sent_s` and `ended_s` are on the monotonic clock.
    `completion_tokens`, `prompt_tokens`: from its usage. `stuck`: abandoned after a long time
    without a token. `hung_up`: the client disconnected early.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    ended_s: float
    finished: bool
    completion_tokens: int
    failure: str = ""
    stuck: bool = False
    sent_s: float = 0.0
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    status: int = 200
    hung_up: bool = False
    request_id: str = ""

    def runs(self, at_s: float) -> bool:
        """Whether at `at_s` it was sent, had not ended, and lacked its last token."""
        last_s = self.times_s[-1] if self.finished and self.times_s else self.ended_s
        return self.sent_s <= at_s < last_s

    def has_tokens_left(self, at_s: float) -> bool:
        """Whether at `at_s` it had a token, but not the last."""
        return bool(self.times_s) and self.times_s[0] <= at_s and self.runs(at_s)

    def silence_s(self, since_s: float) -> float:
        """The longest gap after `since_s` between tokens, or from the last token to the end.

        The wait for the first token counts from the send time or `since_s`, whichever is later.
        """
        first_s = self.times_s[0] if self.times_s else self.ended_s
        waited_s = max(0.0, first_s - max(self.sent_s, since_s))
        pairs = pairwise((*self.times_s, self.ended_s) if self.times_s else ())
        gaps_s = (later - earlier for earlier, later in pairs if later > since_s)
        return max(waited_s, max(gaps_s, default=0.0))


def ending_of(outcome: StreamOutcome, wanted: Undisturbed) -> tuple[str, str]:
    """The ending of a request compared with its undisturbed run, and why it is not `completed`.

    Unexpected tokens take precedence over missing tokens.
    """
    got = len(outcome.token_ids)
    if got > len(wanted.token_ids):
        return DUPLICATED, outcome.failure
    if contradiction := wanted.contradiction(outcome.token_ids, outcome.text):
        return DIFFERENT, contradiction
    if outcome.stuck:
        return STUCK, outcome.failure
    if outcome.failure or not outcome.finished or got < len(wanted.token_ids):
        return LOST, outcome.failure or "it ended"
    wrong = wanted.wrong_end(outcome)
    return (DIFFERENT, wrong) if wrong else (COMPLETED, "")


def ending_by_length(outcome: StreamOutcome, tokens: int) -> tuple[str, str]:
    """The ending according to the usage alone, for a request without an undisturbed run."""
    if outcome.stuck:
        return STUCK, outcome.failure
    if outcome.finished and outcome.completion_tokens > tokens:
        return DUPLICATED, outcome.failure
    if outcome.failure or not outcome.finished or outcome.completion_tokens < tokens:
        return LOST, outcome.failure or "it ended"
    return COMPLETED, ""


def ending_problem(name: str, ending: tuple[str, str], outcome: StreamOutcome, tokens: int) -> str:
    """A sentence about a request of `tokens` tokens that did not complete."""
    (kind, why), got = ending, len(outcome.token_ids) or len(outcome.times_s)
    return f"{name} is {kind} after {got} of {tokens} tokens{f': {why}' if why else ''}"


@dataclass(slots=True)
class Tally:
    """Counts of request endings; `errors` describe the first bad endings."""

    sent: int = 0
    completed: int = 0
    hung_up: int = 0
    refused: int = 0
    lost: int = 0
    duplicated: int = 0
    stuck: int = 0
    different: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Number of ended requests, in whichever way."""
        return sum(getattr(self, name) for name in (COMPLETED, *OTHERWISE))

    def note(
        self, number: int, outcome: StreamOutcome, tokens: int, wanted: Undisturbed | None
    ) -> None:
        """Count a request of `tokens` tokens, compared with its undisturbed answer if known."""
        if outcome.hung_up or outcome.status in REFUSALS:
            self.hung_up += outcome.hung_up
            self.refused += not outcome.hung_up
            return
        # With known ids, count the received tokens instead of the usage.
        self.tokens += outcome.completion_tokens if wanted is None else len(outcome.token_ids)
        ending = ending_of(outcome, wanted) if wanted else ending_by_length(outcome, tokens)
        setattr(self, ending[0], getattr(self, ending[0]) + 1)
        if ending[0] != COMPLETED and len(self.errors) < ERRORS_MAX:
            name = f"request {number} ({outcome.request_id})"
            self.errors.append(ending_problem(name, ending, outcome, tokens))

    def problems(self, refusals: bool = False) -> list[str]:
        """A sentence per kind of bad ending, including refusals with `refusals`."""
        names = (*KINDS[1:], *(("refused",) if refusals else ()))
        counted = {name: getattr(self, name) for name in names}
        problems = [f"{count} requests were {name}" for name, count in counted.items() if count]
        if self.ended != self.sent:
            problems.append(f"{self.sent} requests were sent, and {self.ended} ended")
        if not self.completed:
            problems.append("no request was completed")
        return problems + self.errors

    def counts(self) -> dict[str, int]:
        """The counts as JSON."""
        return {
            field_.name: getattr(self, field_.name)
            for field_ in fields(self)
            if field_.name != "errors"
        }

    def add(self, other: "Tally") -> None:
        """Add the counts of another load."""
        for field_ in fields(self):
            setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))


def request_rows(requests: Mapping[str, int]) -> list[tuple[str, str]]:
    """Counts of requests as table rows."""
    others = ", ".join(
        f"{name.replace('_', ' ')} {requests[name]}" for name in OTHERWISE if name in requests
    )
    return [
        ("requests sent / completed", f"{requests['sent']:,} / {requests['completed']:,}"),
        ("requests otherwise", others),
    ]
