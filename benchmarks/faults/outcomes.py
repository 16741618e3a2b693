"""How disturbed requests ended, beside an undisturbed run of the same requests: pure."""

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
    """The answer of an undisturbed run. `prompt_tokens` is what its usage said."""

    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0

    def contradiction(self, token_ids: Sequence[int], text: str) -> str:
        """How the part of another run that has arrived differs; "" if it does not."""
        for index, (got, wanted) in enumerate(zip(token_ids, self.token_ids, strict=False)):
            if got != wanted:
                return f"token {index} is {got} and not {wanted}"
        return "" if self.text.startswith(text) else "the text is another one"

    def wrong_end(self, outcome: "StreamOutcome") -> str:
        """How another run that ended with all its tokens differs; "" if it does not."""
        completion_tokens = outcome.told_tokens
        if completion_tokens != (wanted := len(self.token_ids)):
            return f"usage has {completion_tokens} completion tokens and not {wanted}"
        if outcome.prompt_tokens != self.prompt_tokens:
            return f"usage has {outcome.prompt_tokens} prompt tokens and not {self.prompt_tokens}"
        if outcome.finish_reason != self.finish_reason:
            return f"the finish reason is '{outcome.finish_reason}' and not '{self.finish_reason}'"
        return "" if outcome.text == self.text else "the text is another one"


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """How a stream went. `failure`: what its client heard or saw instead of the end, "" if none.

    `times_s` are those of its tokens on the monotonic clock, on which it was sent at `sent_s` and
    ended at `ended_s`. `told_tokens`, `prompt_tokens`: what its usage says. `stuck`: it was given
    up, since no token came for long. `hung_up`: its client was impatient.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    ended_s: float
    finished: bool
    told_tokens: int
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
        """Whether it was sent by that time, and had neither ended nor its last token."""
        last_s = self.times_s[-1] if self.finished and self.times_s else self.ended_s
        return self.sent_s <= at_s < last_s

    def has_tokens_left(self, at_s: float) -> bool:
        """Whether it had a token at that time, and not the last one."""
        return bool(self.times_s) and self.times_s[0] <= at_s and self.runs(at_s)

    def silence_s(self, since_s: float) -> float:
        """The longest time from a token to the next one, or to the end, that is after `since_s`.

        The wait for the first token counts from when it was sent, or from `since_s` if that is
        later.
        """
        first_s = self.times_s[0] if self.times_s else self.ended_s
        waited_s = max(0.0, first_s - max(self.sent_s, since_s))
        pairs = pairwise((*self.times_s, self.ended_s) if self.times_s else ())
        gaps_s = (later - earlier for earlier, later in pairs if later > since_s)
        return max(waited_s, max(gaps_s, default=0.0))


def ending_of(outcome: StreamOutcome, wanted: Undisturbed) -> tuple[str, str]:
    """How a request ended beside its undisturbed run, and why that is not `completed`.

    Tokens that should not be there outweigh tokens that are missing.
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
    """The same by the usage alone, for a request without an undisturbed run."""
    if outcome.stuck:
        return STUCK, outcome.failure
    if outcome.finished and outcome.told_tokens > tokens:
        return DUPLICATED, outcome.failure
    if outcome.failure or not outcome.finished or outcome.told_tokens < tokens:
        return LOST, outcome.failure or "it ended"
    return COMPLETED, ""


def ending_problem(name: str, ending: tuple[str, str], outcome: StreamOutcome, tokens: int) -> str:
    """A sentence about a request of so many `tokens` that did not complete."""
    (kind, why), got = ending, len(outcome.token_ids) or len(outcome.times_s)
    return f"{name} is {kind} after {got} of {tokens} tokens{f': {why}' if why else ''}"


@dataclass(slots=True)
class Tally:
    """How requests have ended; `errors` are the first of those that should have ended otherwise."""

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
        """All requests that have ended, in whichever way."""
        return sum(getattr(self, name) for name in (COMPLETED, *OTHERWISE))

    def note(
        self, number: int, outcome: StreamOutcome, tokens: int, wanted: Undisturbed | None
    ) -> None:
        """Count a request of so many `tokens`, beside its undisturbed answer if that is known."""
        if outcome.hung_up or outcome.status in REFUSALS:
            self.hung_up += outcome.hung_up
            self.refused += not outcome.hung_up
            return
        # Where their ids are known, tokens count that have come, not those of the usage.
        self.tokens += outcome.told_tokens if wanted is None else len(outcome.token_ids)
        ending = ending_of(outcome, wanted) if wanted else ending_by_length(outcome, tokens)
        setattr(self, ending[0], getattr(self, ending[0]) + 1)
        if ending[0] != COMPLETED and len(self.errors) < ERRORS_MAX:
            name = f"request {number} ({outcome.request_id})"
            self.errors.append(ending_problem(name, ending, outcome, tokens))

    def problems(self, refusals: bool = False) -> list[str]:
        """A sentence for each kind of bad end; with `refusals`, these are bad, too."""
        names = (*KINDS[1:], *(("refused",) if refusals else ()))
        counted = {name: getattr(self, name) for name in names}
        problems = [f"{count} requests were {name}" for name, count in counted.items() if count]
        if self.ended != self.sent:
            problems.append(f"{self.sent} requests were sent, and {self.ended} ended")
        if not self.completed:
            problems.append("no request was completed")
        return problems + self.errors

    def counts(self) -> dict[str, int]:
        """The figures, for a file."""
        return {
            field_.name: getattr(self, field_.name)
            for field_ in fields(self)
            if field_.name != "errors"
        }

    def add(self, other: "Tally") -> None:
        """Count what another load has counted, too."""
        for field_ in fields(self):
            setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))


def request_rows(requests: Mapping[str, int]) -> list[tuple[str, str]]:
    """Counts of requests for people."""
    others = ", ".join(
        f"{name.replace('_', ' ')} {requests[name]}" for name in OTHERWISE if name in requests
    )
    return [
        ("requests sent / completed", f"{requests['sent']:,} / {requests['completed']:,}"),
        ("requests otherwise", others),
    ]
