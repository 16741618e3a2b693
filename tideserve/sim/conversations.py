"""Requests of conversations, each of whose prompts begins with all that was said before.

People who chat and agents that call tools differ in numbers only: `CHATS` and `AGENTS`. A
conversation begins with one of a few texts that many share (a system prompt, descriptions of
tools); then each turn adds a question, which is what a person or a tool says, and the answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from tideserve.sim.workload import PREFIX_BLOCK_TOKENS, Arrival, Length, gamma_times

ANSWER_TOKEN_S = 0.03
"""A next turn comes no sooner than an answer takes to read or to make, by the token."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Kinds of conversations: `openings` texts of `opening` tokens with which they may begin.

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
