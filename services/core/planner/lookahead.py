"""Microbatches of a pipeline round, formed together so that they cost the same (KunServe §4.3).

All that the round runs is cut into consecutive parts whose largest cost is least; a request may be
cut into chunks, the later with the earlier as prefix (KunServe Figures 10-11). KunServe halves
recursively until a part has few tokens. Here other numbers of parts than powers of two are tried,
too, and they are kept within the token budget while they are balanced. On modelled pipelines this
left three quarters of the bubbles that halving left; where the token budget was small, halving what
exceeded it had left three times the bubbles of microbatches formed by token count.
"""

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Row
from heapq import heapify, heapreplace
from itertools import accumulate
from math import inf
from typing import Generic, NamedTuple, TypeVar

from services.core.cost.model import CostModel

COST_TOLERANCE = 1e-6
"""Relative: sums of the same costs in another order are the same."""

ROUND_TOLERANCE = 0.02
"""By how much a round with more parts may be longer than the shortest one: stages wait less in it.
Modelled: a sixth less bubbles, first tokens up to a sixth later."""

BALANCE_TOLERANCE = 2e-3
"""How close the largest cost of the parts comes to the least one, relative to it."""

Key = TypeVar("Key")

_Place = tuple[int, int]
"""Between two batches: so many whole pieces, and so many tokens of the next one, are before it."""


class Piece(NamedTuple, Generic[Key]):
    """The next `tokens` tokens of `key`, after `prefix` tokens that are in the KV cache then."""

    key: Key
    prefix: int
    tokens: int


def marginal(model: CostModel, prefix: int, tokens: int) -> float:
    """What a chunk adds to a batch that runs anyway; 0 for no tokens."""
    return model.chunk_s(prefix, tokens) - model.lam if tokens else 0.0


def batch_cost(model: CostModel, pieces: Iterable[Piece[Key]]) -> float:
    """What a microbatch costs; 0 for an empty one."""
    return model.batch_s((piece.prefix, piece.tokens) for piece in pieces)


def round_cost(costs: Row[float], stages: int = 2) -> float:
    """What a round costs whose microbatches pass `stages` stages in lockstep.

    At any moment the stages run neighbouring microbatches and all wait for the longest. For two
    stages: cost(b₁) + Σ max(cost(b_k), cost(b_{k+1})) + cost(b_m).
    """
    padded = [0.0] * (stages - 1) + list(costs) + [0.0] * (stages - 1)
    return sum(max(padded[step : step + stages]) for step in range(len(costs) + stages - 1))


def form_round(
    pieces: Row[Piece[Key]],
    stages: int,
    model: CostModel,
    tokens_min: int,
    tokens_max: int,
    base: float = 0.0,
    cost_max: float = inf,
) -> list[list[Piece[Key]]]:
    """Deal `pieces`, in their order, into microbatches of similar cost that make a short round.

    No part has more than `tokens_max` tokens, and on average they have more than half of
    `tokens_min` where there are several. A piece that is cut appears in consecutive parts. `base`
    is what the decodes cost that join each microbatch of the round, and run in `stages`
    microbatches in any case; 0 without any. With that, no part costs more than `cost_max` as far as
    its tokens can be cut.
    """
    if not pieces:
        return []
    partitioner = _Partitioner(pieces, model.beyond_knee, tokens_max)
    tokens = partitioner.tokens[-1]
    parts = -(-tokens // tokens_max)
    if cost_max < inf:
        parts = max(parts, partitioner.parts_within(cost_max - (base or model.lam)))
    most = max(parts, 2 * tokens // (tokens_min + 1))
    tried: list[tuple[float, list[list[Piece[Key]]]]] = []
    least = inf
    while parts <= most:
        formed = partitioner.partition(parts)
        cost = _round_cost_of(formed, stages, model, base)
        tried.append((cost, formed))
        least = min(least, cost)
        # Each part loads the parameters again: beyond some number the round only gets longer.
        if cost > least * (1 + ROUND_TOLERANCE):
            break
        parts += max(1, parts // 4)
    return next(formed for cost, formed in reversed(tried) if cost <= least * (1 + ROUND_TOLERANCE))


def decodes_to_run(ready: Row[float], in_flight: Iterable[float], stages: int) -> int:
    """How many of the `ready` decodes, given by cost, the next of `stages` microbatches takes.

    `in_flight` is what the decodes of each microbatch in flight cost when they run next. One is
    left for another microbatch only if that then costs less than this one with it: so the first
    microbatches share out what is ready, and a distribution, once even, stays so.
    """
    others = list(in_flight)
    others += [0.0] * (stages - 1 - len(others))
    heapify(others)
    cost, count = sum(ready), len(ready)
    while count > 1 and others[0] + ready[count - 1] < cost * (1 - COST_TOLERANCE):
        count -= 1
        cost -= ready[count]
        heapreplace(others, others[0] + ready[count])
    return count


class _Partitioner(Generic[Key]):
    """Cuts a row of pieces into consecutive batches of at most `tokens_max` tokens."""

    def __init__(self, pieces: Row[Piece[Key]], model: CostModel, tokens_max: int) -> None:
        self._pieces = pieces
        self._model = model
        self._tokens_max = tokens_max
        costs = (marginal(model, prefix, tokens) for _, prefix, tokens in pieces)
        # Entry i is the cost of the first i pieces together.
        self._costs = list(accumulate(costs, initial=0.0))
        self.tokens = list(accumulate((piece.tokens for piece in pieces), initial=0))

    def partition(self, parts: int) -> list[list[Piece[Key]]]:
        """At most `parts` batches, enough for the tokens; the largest cost is nearly the least."""
        cuts = self._cut(inf, parts)
        assert cuts is not None, f"{parts} parts of {self._tokens_max} tokens are too few"
        # A chunk reads the K/V of those before it: cut pieces cost no less than whole ones.
        low, high = self._costs[-1] / parts, self._costs[-1]
        trial = 1.02 * low
        while low * (1 + BALANCE_TOLERANCE) < high:
            found = self._cut(trial, parts)
            if found is None:
                low = trial
            else:
                cuts, high = found, trial
            # The limit found is nearly always close to the bound below.
            trial = (low + high) / 2 if high < 2 * low else 1.1 * low
        return self._batches(cuts)

    def parts_within(self, limit: float) -> int:
        """How many parts there are if each costs up to `limit`, or little more than a token."""
        tokens = self.tokens[-1]
        limit = max(limit, self._costs[-1] / tokens)
        while (cuts := self._cut(limit, tokens)) is None:
            limit *= 2
        return len(cuts) + 1

    def _cut(self, limit: float, parts: int) -> list[_Place] | None:
        """Where batches end that cost up to `limit`, the last left out; None if too many."""
        place: _Place = (0, 0)
        cuts: list[_Place] = []
        while True:
            end = self._end_of_batch(place, limit)
            if end[0] == len(self._pieces):
                return cuts
            cuts.append(end)
            if len(cuts) == parts or end == place:
                return None
            place = end

    def _end_of_batch(self, start: _Place, limit: float) -> _Place:
        """How far a batch from `start` goes."""
        index, offset = start
        left, room = limit, self._tokens_max
        if offset:
            _, prefix, tokens = self._pieces[index]
            rest = tokens - offset
            cost = marginal(self._model, prefix + offset, rest)
            if rest > room or cost > left:
                most = min(rest - 1, room)
                return index, offset + self._model.tokens_within(prefix + offset, left, most)
            index, left, room = index + 1, left - cost, room - rest
        whole = min(
            bisect_right(self._costs, self._costs[index] + left),
            bisect_right(self.tokens, self.tokens[index] + room),
        )
        reached = max(index, whole - 1)
        if reached == len(self._pieces):
            return reached, 0
        left -= self._costs[reached] - self._costs[index]
        room -= self.tokens[reached] - self.tokens[index]
        _, prefix, tokens = self._pieces[reached]
        return reached, self._model.tokens_within(prefix, left, min(tokens - 1, room))

    def _batches(self, cuts: Iterable[_Place]) -> list[list[Piece[Key]]]:
        batches: list[list[Piece[Key]]] = []
        index, offset = 0, 0
        for end, end_offset in (*cuts, (len(self._pieces), 0)):
            batch: list[Piece[Key]] = []
            while (index, offset) < (end, end_offset):
                key, prefix, tokens = self._pieces[index]
                until = end_offset if index == end else tokens
                batch.append(Piece(key, prefix + offset, until - offset))
                index, offset = (index, until) if index == end else (index + 1, 0)
            batches.append(batch)
        return batches


def _round_cost_of(
    parts: Iterable[list[Piece[Key]]], stages: int, model: CostModel, base: float
) -> float:
    """The cost of a round of these parts, with the decodes that join each of them."""
    shared = model.lam if base else 0.0
    costs = [batch_cost(model, part) + base - shared for part in parts]
    if base:
        costs += [base] * (stages - len(costs))
    return round_cost(costs, stages)
