"""Workloads of a simulation: arrival times and lengths of requests, drawn from a seed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, repeat
from random import Random
from typing import NamedTuple

from services.core.service import DEFAULT_SERVICE, Service

PREFIX_BLOCK_TOKENS = 512
"""Tokens of a block that an id of `prefix_ids` stands for, as in Mooncake's traces."""
OWN_TOKEN = -2
"""Tokens that only one prompt has are this and below; tokens of shared blocks are 0 and above."""


class Arrival(NamedTuple):
    """A request: its arrival in seconds from the start, and its exact lengths.

    Prompts with equal leading `prefix_ids` begin with the same tokens, `PREFIX_BLOCK_TOKENS` for
    each id; the rest of a prompt is unique.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    service: Service = DEFAULT_SERVICE

    def prompt_ids(self, number: int) -> tuple[int, ...]:
        """Return the tokens of the prompt; `number` must be unique among requests."""
        shared = self.prefix_ids[: self.prompt_tokens // PREFIX_BLOCK_TOKENS]
        ids = [block for block in shared for _ in range(PREFIX_BLOCK_TOKENS)]
        return (*ids, *repeat(OWN_TOKEN - number, self.prompt_tokens - len(ids)))


@dataclass(frozen=True, slots=True)
class Length:
    """Log-normal number of tokens with coefficient of variation `cv`, clipped to [least, most].

    With `cv` 0, every length is the mean.
    """

    mean: float
    cv: float = 0.0
    least: int = 1
    most: int = 1_000_000

    def draw(self, rng: Random) -> int:
        """Draw a length."""
        value = self.mean
        if self.cv > 0:
            # Parameters of the underlying normal distribution.
            variance = math.log(1 + self.cv**2)
            value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return max(self.least, min(self.most, round(value)))


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Number of tokens, uniform from `least` to `most`."""

    least: int
    most: int

    def draw(self, rng: Random) -> int:
        """Draw a length."""
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals in order of time, independent of the ends of other requests."""

    arrivals: Sequence[Arrival]

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts may share prefixes."""
        return any(arrival.prefix_ids for arrival in self.arrivals)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when its last has ended.

    They take requests in order from `requests` and send none after `duration_s`. `in_batches`: all
    clients send their next requests when the requests of all have ended.
    """

    requests: Iterator[Arrival]
    concurrency: int
    duration_s: float = math.inf
    in_batches: bool = False

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts may share prefixes: never."""
        return False


@dataclass(frozen=True, slots=True)
class CoServed:
    """Online requests beside a backlog of batch requests, which use the remaining capacity.

    Batch requests are sent until the last online request has ended; those that run then are cut
    off. Throughput is measured from `window_from_s` to the last online arrival.
    """

    online: OpenLoop
    batch: ClosedLoop
    window_from_s: float = 0.0

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts may share prefixes."""
        return self.online.shares_prefixes

    @property
    def window_s(self) -> tuple[float, float]:
        """Start and end of the measurement; empty if no request arrives in the window."""
        end_s = max((arrival.arrival_s for arrival in self.online.arrivals), default=0.0)
        return min(self.window_from_s, end_s), end_s


Workload = OpenLoop | ClosedLoop | CoServed
Phase = tuple[float, float]
"""Duration in seconds, and requests per second."""


def gamma_times(rate_per_s: float, cv: float, duration_s: float, rng: Random) -> Iterator[float]:
    """Yield times with gamma-distributed gaps; `cv` 1 is a Poisson process, 0 a fixed interval."""
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
    """Yield times with gamma-distributed gaps at each phase's rate; none at rate 0."""
    start_s = 0.0
    for length_s, rate_per_s in phases:
        if rate_per_s > 0:
            for time_s in gamma_times(rate_per_s, cv, length_s, rng):
                yield start_s + time_s
        start_s += length_s


def on_off_phases(on: Phase, off: Phase, duration_s: float) -> Iterator[Phase]:
    """Alternate `on` and `off` until the duration is over."""
    for length_s, rate_per_s in cycle((on, off)):
        if duration_s <= 0:
            return
        yield min(length_s, duration_s), rate_per_s
        duration_s -= length_s


def burst_phases(
    rates_per_s: tuple[float, float], burst: tuple[float, float], duration_s: float
) -> Iterator[Phase]:
    """Use the first rate, and the second between the times of `burst`."""
    bounds = (0.0, min(burst[0], duration_s), min(burst[1], duration_s), duration_s)
    calm, high = rates_per_s
    for rate_per_s, start_s, end_s in zip((calm, high, calm), bounds, bounds[1:], strict=False):
        yield end_s - start_s, rate_per_s


def with_lengths(
    times_s: Iterable[float], prompt: Length, output: Length, rng: Random
) -> Iterator[Arrival]:
    """Yield a request at each time."""
    for time_s in times_s:
        yield Arrival(time_s, prompt.draw(rng), output.draw(rng))


ANSWER_TOKEN_S = 0.03
"""Time per token of an answer before the next turn: for generating or reading the answer."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations; each prompt begins with all earlier turns of its conversation.

    A conversation begins with one of `openings` texts of `opening` tokens (a system prompt,
    descriptions of tools). Each turn adds a question, from a person or a tool, and the answer.
    `turns` is drawn for each conversation; `question` and `answer` (tokens) and `pause` (seconds
    between an answer and the next question) for each turn.
    """

    openings: int
    opening: Length
    turns: Length
    question: Length
    answer: Length
    pause: Length
    tokens_max: int = 120_000

    def arrivals(self, rate_per_s: float, duration_s: float, rng: Random) -> list[Arrival]:
        """Draw requests, in order of time; `rate_per_s` conversations begin during `duration_s`."""
        ids = count()
        openings = [
            tuple(next(ids) for _ in range(self.opening.draw(rng) // PREFIX_BLOCK_TOKENS))
            for _ in range(self.openings)
        ]
        arrivals: list[Arrival] = []
        for begin_s in gamma_times(rate_per_s, 1.0, duration_s, rng):
            # Popularity of openings by Zipf's law: 1, 1/2, 1/3 …
            shares = [1 / (place + 1) for place in range(self.openings)]
            (opening,) = rng.choices(openings, shares)
            arrivals += self._conversation(begin_s, opening, ids, rng)
        return sorted(arrivals)

    def _conversation(
        self, begin_s: float, opening: tuple[int, ...], ids: Iterator[int], rng: Random
    ) -> Iterator[Arrival]:
        """Yield the turns of a conversation."""
        blocks, tokens, now_s = list(opening), len(opening) * PREFIX_BLOCK_TOKENS, begin_s
        for _ in range(self.turns.draw(rng)):
            tokens += self.question.draw(rng)
            answer = self.answer.draw(rng)
            if tokens + answer > self.tokens_max:
                return
            # Only whole blocks can be shared with the next turn.
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
"""Conversations of people about texts: long questions, few turns, long pauses.

An unlimited cache would hit 41 % of the prompt tokens, of which there are 14,000 per request on
average; the figures of Mooncake's conversations are 37 % and 12,000.
"""

AGENTS = Conversations(
    openings=64,
    opening=Length(1_500, 0.5, least=PREFIX_BLOCK_TOKENS, most=20_000),
    turns=Length(3, 0.7, most=60),
    question=Length(4_000, 1.2, least=32, most=20_000),
    answer=Length(120, 0.8, least=8, most=1_000),
    pause=Length(15, 1.0, most=120),
)
"""Agents: shared descriptions of tools, and steps in quick succession.

An unlimited cache would hit 65 % of the prompt tokens, of which there are 12,000 per request on
average; in Mooncake's synthetic trace it would hit the same share.
"""
