"""Requests to simulate: when they arrive and how long they are, from a seed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, repeat
from random import Random
from typing import NamedTuple

from services.core.service import NO_PROMISE, Service

PREFIX_BLOCK_TOKENS = 512
"""Tokens behind one of the `prefix_ids` of a prompt, as in Mooncake's traces."""
OWN_TOKEN = -2
"""Tokens that are a prompt's own are this and below; those of known blocks are 0 and above."""


class Arrival(NamedTuple):
    """A request: seconds from the start, and its lengths; all of `output_tokens` are generated.

    Prompts with equal leading `prefix_ids` begin with the same tokens, `PREFIX_BLOCK_TOKENS` for
    each id; the rest is the prompt's own.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    service: Service = NO_PROMISE

    def prompt_ids(self, number: int) -> tuple[int, ...]:
        """The tokens of the prompt; `number` differs from that of every other request."""
        shared = self.prefix_ids[: self.prompt_tokens // PREFIX_BLOCK_TOKENS]
        ids = [block for block in shared for _ in range(PREFIX_BLOCK_TOKENS)]
        return (*ids, *repeat(OWN_TOKEN - number, self.prompt_tokens - len(ids)))


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens: log-normal of this mean and coefficient of variation, within [least, most].

    `cv` 0 gives the mean itself.
    """

    mean: float
    cv: float = 0.0
    least: int = 1
    most: int = 1_000_000

    def draw(self, rng: Random) -> int:
        """One length."""
        value = self.mean
        if self.cv > 0:
            variance = math.log(1 + self.cv**2)
            value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return max(self.least, min(self.most, round(value)))


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Tokens: each number from `least` to `most` is as likely."""

    least: int
    most: int

    def draw(self, rng: Random) -> int:
        """One length."""
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals that wait for nobody, in order of time."""

    arrivals: Sequence[Arrival]

    @property
    def shares_prefixes(self) -> bool:
        """Whether some prompt may begin as another one does."""
        return any(one.prefix_ids for one in self.arrivals)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when the last has ended.

    They take one after another from `requests`; no client starts one after `duration_s`.
    `in_batches`: each sends its next request when those of all have ended.
    """

    requests: Iterator[Arrival]
    concurrency: int
    duration_s: float = math.inf
    in_batches: bool = False

    @property
    def shares_prefixes(self) -> bool:
        """No prompt begins as another one does."""
        return False


@dataclass(frozen=True, slots=True)
class CoServed:
    """Online requests, and clients of a backlog of batch requests that take what is left for them.

    Batch requests go on until the last online one has ended, and those that run then are cut off.
    What the workers computed counts from `window_from_s` to the last online arrival.
    """

    online: OpenLoop
    batch: ClosedLoop
    window_from_s: float = 0.0

    @property
    def shares_prefixes(self) -> bool:
        """Whether some prompt may begin as another one does."""
        return self.online.shares_prefixes

    @property
    def window_s(self) -> tuple[float, float]:
        """From when to when processed tokens count; empty without an arrival in it."""
        end_s = max((one.arrival_s for one in self.online.arrivals), default=0.0)
        return min(self.window_from_s, end_s), end_s


Workload = OpenLoop | ClosedLoop | CoServed
Phase = tuple[float, float]
"""Seconds, and requests a second in them."""


def gamma_times(rate_per_s: float, cv: float, duration_s: float, rng: Random) -> Iterator[float]:
    """Times whose gaps are gamma distributed; `cv` 1 is a Poisson process, 0 a metronome."""
    mean_s = 1 / rate_per_s
    now_s = 0.0
    while True:
        if cv > 0:
            now_s += rng.gammavariate(1 / cv**2, mean_s * cv**2)
        else:
            now_s += mean_s
        if now_s > duration_s:
            return
        yield now_s


def phased_times(phases: Iterable[Phase], cv: float, rng: Random) -> Iterator[float]:
    """Gamma distributed gaps whose rate changes with the phases; a rate of 0 is silence."""
    start_s = 0.0
    for length_s, rate_per_s in phases:
        if rate_per_s > 0:
            for time_s in gamma_times(rate_per_s, cv, length_s, rng):
                yield start_s + time_s
        start_s += length_s


def on_off_phases(on: Phase, off: Phase, duration_s: float) -> Iterator[Phase]:
    """Two phases in turn, the first one first, until the duration is over."""
    for length_s, rate_per_s in cycle((on, off)):
        if duration_s <= 0:
            return
        yield min(length_s, duration_s), rate_per_s
        duration_s -= length_s


def burst_phases(
    rates_per_s: tuple[float, float], burst: tuple[float, float], duration_s: float
) -> Iterator[Phase]:
    """The first rate, and the second between the times of `burst`."""
    bounds = (0.0, min(burst[0], duration_s), min(burst[1], duration_s), duration_s)
    calm, high = rates_per_s
    for rate_per_s, start_s, end_s in zip((calm, high, calm), bounds, bounds[1:], strict=False):
        yield end_s - start_s, rate_per_s


def with_lengths(
    times_s: Iterable[float], prompt: Length, output: Length, rng: Random
) -> Iterator[Arrival]:
    """A request at each time."""
    for time_s in times_s:
        yield Arrival(time_s, prompt.draw(rng), output.draw(rng))


ANSWER_TOKEN_S = 0.03
"""A next turn comes no sooner than an answer takes to read or to make, by the token."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations, each of whose prompts begins with all that was said before.

    They begin with one of `openings` texts of `opening` tokens (a system prompt, descriptions of
    tools); then each turn adds a question, which is what a person or a tool says, and the answer.
    `turns`, `question` and `answer` (tokens) are drawn for each conversation or turn; so is
    `pause`, the seconds between an answer and the next question.
    """

    openings: int
    opening: Length
    turns: Length
    question: Length
    answer: Length
    pause: Length
    tokens_max: int = 120_000

    def arrivals(self, rate_per_s: float, duration_s: float, rng: Random) -> list[Arrival]:
        """Requests in order of time; so many conversations a second begin within `duration_s`."""
        ids = count()
        openings = [
            tuple(next(ids) for _ in range(self.opening.draw(rng) // PREFIX_BLOCK_TOKENS))
            for _ in range(self.openings)
        ]
        found: list[Arrival] = []
        for begin_s in gamma_times(rate_per_s, 1.0, duration_s, rng):
            # The first openings are the most popular ones, as 1, 1/2, 1/3 …
            shares = [1 / (place + 1) for place in range(self.openings)]
            (opening,) = rng.choices(openings, shares)
            found += self._conversation(begin_s, opening, ids, rng)
        return sorted(found)

    def _conversation(
        self, begin_s: float, opening: tuple[int, ...], ids: Iterator[int], rng: Random
    ) -> Iterator[Arrival]:
        """The turns of one conversation."""
        blocks, tokens, now_s = list(opening), len(opening) * PREFIX_BLOCK_TOKENS, begin_s
        for _ in range(self.turns.draw(rng)):
            tokens += self.question.draw(rng)
            answer = self.answer.draw(rng)
            if tokens + answer > self.tokens_max:
                return
            while (len(blocks) + 1) * PREFIX_BLOCK_TOKENS <= tokens:
                blocks.append(next(ids))
            yield Arrival(now_s, tokens, answer, tuple(blocks))
            tokens += answer
            now_s += ANSWER_TOKEN_S * answer + self.pause.draw(rng)


CHATS = Conversations(
    openings=64,
    opening=Length(600, 0.5, least=PREFIX_BLOCK_TOKENS, most=8_000),
    turns=Length(1.5, 0.7, most=40),
    question=Length(8_000, 1.2, least=8, most=40_000),
    answer=Length(300, 0.8, least=8, most=2_000),
    pause=Length(60, 1.0, most=600),
)
"""People who talk about texts: long questions, few turns, long pauses between them.

A cache without an end would hit 41 % of the tokens of prompts, which have 14,000 on average; in
Mooncake's conversations these are 37 % and 12,000.
"""

AGENTS = Conversations(
    openings=64,
    opening=Length(1_500, 0.5, least=PREFIX_BLOCK_TOKENS, most=20_000),
    turns=Length(3, 0.7, most=60),
    question=Length(4_000, 1.2, least=32, most=20_000),
    answer=Length(120, 0.8, least=8, most=1_000),
    pause=Length(15, 1.0, most=120),
)
"""Agents: descriptions of tools that many share, and steps soon after one another.

A cache without an end would hit 65 % of the tokens of prompts, which have 12,000 on average; in
Mooncake's synthetic trace it would hit as many.
"""
