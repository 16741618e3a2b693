"""Lookahead batch formation: balanced microbatches of a pipeline round (KunServe §4.3).

A *round* is the prefill work that the leader of a pipeline of several stages plans at once; each
part becomes a microbatch. It is cut into consecutive parts such that the largest cost of a part is
minimal. A prompt may be cut into chunks; an earlier chunk is then part of the prefix of a later
chunk (KunServe Figures 10-11). KunServe halves recursively until a part has few tokens. This module
also tries numbers of parts other than powers of two, and balances within the token budget: on
modelled pipelines this left three quarters of the bubbles (idle time of stages) of halving. With a
small token budget, halving left three times the bubbles of microbatches formed by token count.
Costs are seconds predicted by the cost model.
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
"""Relative tolerance within which costs count as equal: sums depend on the order of addition."""

ROUND_TOLERANCE = 0.02
"""A round of more parts is preferred if it costs at most this share more than the cheapest, since
it has fewer bubbles. Modelled: a sixth fewer bubbles, first tokens up to a sixth later."""

STAGE_PARTS_MAX = 32
"""Maximum parts of a round per stage, unless bounds of a part require more: this many leave
bubbles of at most 1 / 32 of a round, and the time of planning grows with the parts."""

BALANCE_TOLERANCE = 2e-3
"""Relative tolerance of the bisection for the minimal largest cost of a part."""

Key = TypeVar("Key")

_Place = tuple[int, int]
"""A cut between two parts: (whole pieces before it, tokens of the next piece before it)."""


class Piece(NamedTuple, Generic[Key]):
    """The next `tokens` tokens of the sequence `key`, after `prefix` tokens in the KV cache."""

    key: Key
    prefix: int
    tokens: int


def marginal(model: CostModel, prefix: int, tokens: int) -> float:
    """Cost that a chunk adds to a non-empty batch; 0 for no tokens."""
    return model.chunk_s(prefix, tokens) - model.lam if tokens else 0.0


def batch_cost(model: CostModel, pieces: Iterable[Piece[Key]]) -> float:
    """Cost of a microbatch; 0 if empty."""
    return model.batch_s((piece.prefix, piece.tokens) for piece in pieces)


def round_cost(costs: Row[float], stages: int = 2) -> float:
    """Cost of a round whose m microbatches of these costs pass `stages` stages in lockstep.

    In each step the stages run neighbouring microbatches and all wait for the longest. For two
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
    """Partition `pieces`, in order, into microbatches of similar cost that make a short round.

    Each part has at most `tokens_max` tokens. More parts than that requires are made only while
    they have on average at least `tokens_min` tokens, up to `STAGE_PARTS_MAX` per stage. A piece
    that is cut appears in consecutive parts. `base` is the cost of the decodes that join each
    microbatch of the round, of which there are at least `stages` then; 0 without decodes. A part
    plus `base` costs at most `cost_max`, unless a single token exceeds it.
    """
    if not pieces:
        return []
    partitioner = _Partitioner(pieces, model.beyond_knee, tokens_max)
    tokens = partitioner.tokens[-1]
    parts = -(-tokens // tokens_max)
    if cost_max < inf:
        parts = max(parts, partitioner.parts_within(cost_max - (base or model.lam)))
    most = max(parts, min(tokens // tokens_min, STAGE_PARTS_MAX * stages))
    tried: list[tuple[float, list[list[Piece[Key]]]]] = []
    least = inf
    # Try growing numbers of parts: more parts mean fewer bubbles, but a fixed cost for each.
    while parts <= most:
        formed = partitioner.partition(parts)
        cost = _round_cost_of(formed, stages, model, base)
        tried.append((cost, formed))
        least = min(least, cost)
        # Each part reads the parameters again: beyond some number of parts, rounds only get longer.
        if cost > least * (1 + ROUND_TOLERANCE):
            break
        parts += max(1, parts // 4)
    # Choose the largest number of parts within the tolerance.
    return next(formed for cost, formed in reversed(tried) if cost <= least * (1 + ROUND_TOLERANCE))


def decodes_to_run(ready: Row[float], in_flight: Iterable[float], stages: int) -> int:
    """Number of the `ready` decodes that the next microbatch runs, so that microbatches cost alike.

    `ready` has the cost of each decode, `in_flight` for each microbatch in flight the cost of the
    next decodes of its sequences.
    """
    # Leave a decode to the cheapest other microbatch only if that microbatch stays cheaper with it
    # than this microbatch. So the first microbatches share the ready decodes, and a balanced
    # distribution persists.
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
    """Cuts pieces into consecutive parts (batches) of at most `tokens_max` tokens."""

    def __init__(self, pieces: Row[Piece[Key]], model: CostModel, tokens_max: int) -> None:
        self._pieces = pieces
        self._model = model
        self._tokens_max = tokens_max
        costs = (marginal(model, prefix, tokens) for _, prefix, tokens in pieces)
        # Prefix sums: entry i is the cost (or the tokens) of the first i pieces.
        self._costs = list(accumulate(costs, initial=0.0))
        self.tokens = list(accumulate((piece.tokens for piece in pieces), initial=0))

    def partition(self, parts: int) -> list[list[Piece[Key]]]:
        """Cut into at most `parts` parts; their largest cost is minimal (`BALANCE_TOLERANCE`)."""
        cuts = self._cut(inf, parts)
        assert cuts is not None, f"{parts} parts of {self._tokens_max} tokens are too few"
        # Bisect the cost limit of a part. The mean is a lower bound: a chunk also reads the K/V of
        # the chunks before it, so cut pieces cost no less than whole ones.
        low, high = self._costs[-1] / parts, self._costs[-1]
        trial = 1.02 * low
        while low * (1 + BALANCE_TOLERANCE) < high:
            trial_cuts = self._cut(trial, parts)
            if trial_cuts is None:
                low = trial
            else:
                cuts, high = trial_cuts, trial
            # The optimum is nearly always close to the lower bound: try there before halving.
            trial = (low + high) / 2 if high < 2 * low else 1.1 * low
        return self._batches(cuts)

    def parts_within(self, limit: float) -> int:
        """Number of parts that cost at most `limit` each; raises `limit` if a token costs more."""
        tokens = self.tokens[-1]
        limit = max(limit, self._costs[-1] / tokens)
        while (cuts := self._cut(limit, tokens)) is None:
            limit *= 2
        return len(cuts) + 1

    def _cut(self, limit: float, parts: int) -> list[_Place] | None:
        """Greedy cuts into parts that cost at most `limit`; None if `parts` do not suffice."""
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
        """End of the longest part from `start` within `limit` and the token budget."""
        index, offset = start
        left, room = limit, self._tokens_max
        # First the rest of a piece that the previous part has cut.
        if offset:
            _, prefix, tokens = self._pieces[index]
            rest = tokens - offset
            cost = marginal(self._model, prefix + offset, rest)
            if rest > room or cost > left:
                most = min(rest - 1, room)
                return index, offset + self._model.tokens_within(prefix + offset, left, most)
            index, left, room = index + 1, left - cost, room - rest
        # Then whole pieces, by bisection of the prefix sums, and the start of another piece.
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
    """Cost of a round of these parts, including the decodes that join each of them."""
    shared = model.lam if base else 0.0
    costs = [batch_cost(model, part) + base - shared for part in parts]
    if base:
        costs += [base] * (stages - len(costs))
    return round_cost(costs, stages)
