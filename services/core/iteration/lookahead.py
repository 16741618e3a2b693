"""Microbatches of a pipeline round, formed together so that they cost the same (KunServe §4.3).

Start with one batch of everything that fits and split it recursively into halves of equal cost; a
request may be cut into chunks, the later with the earlier as prefix (Figures 10-11). The figure
ends the recursion by the first part's size; here it ends for each part.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row
from heapq import heapify, heapreplace
from typing import Generic, NamedTuple, TypeVar

from services.core.cost_model import CostModel

TOKENS = CostModel(alpha=0.0, beta=1.0, gamma=0.0, lam=0.0)
"""What a token costs as long as nothing has been measured."""

SLACK = 1e-6
"""Relative: sums of the same costs in another order are the same."""

Key = TypeVar("Key")


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
) -> list[list[Piece[Key]]]:
    """Deal `pieces`, in their order, into microbatches of similar cost; the cheapest such round.

    No part has more than `tokens_max` tokens, and none is split that has `tokens_min` or fewer.
    A piece that is cut appears in consecutive parts. `base` is what the decodes cost that join
    each microbatch of the round, and run in `stages` microbatches in any case; 0 without any.
    """
    if not pieces:
        return []
    best = _limited([list(pieces)], model, tokens_max)
    best_cost = _round_cost_of(best, stages, model, base)
    parts = stages
    while _tokens(pieces) > tokens_min:
        formed = _limited(_deal(pieces, parts, model, tokens_min), model, tokens_max)
        cost = _round_cost_of(formed, stages, model, base)
        if cost < best_cost:
            best, best_cost = formed, cost
        # Each part loads the parameters again: beyond some number the round only gets longer.
        if len(formed) < parts or cost > best_cost * (1 + SLACK):
            return best
        parts *= 2
    return best


def split(
    pieces: Row[Piece[Key]], share: float, model: CostModel
) -> tuple[list[Piece[Key]], list[Piece[Key]]]:
    """Two batches, the first with `share` of their cost; at most one piece is cut."""
    costs = [marginal(model, prefix, tokens) for _, prefix, tokens in pieces]
    rest = sum(costs)
    first = 0.0
    for place, (key, prefix, tokens) in enumerate(pieces):
        rest -= costs[place]
        if first + costs[place] < share * (first + costs[place] + rest):
            first += costs[place]
            continue
        cut = _cut(prefix, tokens, first, rest, share, model)
        left, right = list(pieces[:place]), list(pieces[place + 1 :])
        if cut:
            left.append(Piece(key, prefix, cut))
        if cut < tokens:
            right.insert(0, Piece(key, prefix + cut, tokens - cut))
        return left, right
    return list(pieces), []


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
    while count > 1 and others[0] + ready[count - 1] < cost * (1 - SLACK):
        count -= 1
        cost -= ready[count]
        heapreplace(others, others[0] + ready[count])
    return count


def _round_cost_of(
    parts: Iterable[list[Piece[Key]]], stages: int, model: CostModel, base: float
) -> float:
    """Of these parts, with the decodes that join each of them."""
    shared = model.lam if base else 0.0
    costs = [batch_cost(model, part) + base - shared for part in parts]
    if base:
        costs += [base] * (stages - len(costs))
    return round_cost(costs, stages)


def _cut(
    prefix: int, tokens: int, before: float, after: float, share: float, model: CostModel
) -> int:
    """How many of the tokens to take for the share of `before` + these + `after` to be closest."""

    def excess(cut: int) -> float:
        first = before + marginal(model, prefix, cut)
        second = after + marginal(model, prefix + cut, tokens - cut)
        return first - share * (first + second)

    low, high = 0, tokens
    while high - low > 1:
        middle = (low + high) // 2
        if excess(middle) < 0:
            low = middle
        else:
            high = middle
    return min((low, high), key=lambda cut: abs(excess(cut)))


def _deal(
    pieces: Row[Piece[Key]], parts: int, model: CostModel, tokens_min: int
) -> list[list[Piece[Key]]]:
    """Halve until there are `parts`; what has few tokens stays whole."""
    if parts == 1 or _tokens(pieces) <= tokens_min:
        return [list(pieces)] if pieces else []
    left, right = split(pieces, (parts // 2) / parts, model)
    return [
        *_deal(left, parts // 2, model, tokens_min),
        *_deal(right, parts - parts // 2, model, tokens_min),
    ]


def _limited(
    parts: Iterable[list[Piece[Key]]], model: CostModel, tokens_max: int
) -> list[list[Piece[Key]]]:
    """Halve what has too many tokens."""
    limited: list[list[Piece[Key]]] = []
    for part in parts:
        if _tokens(part) <= tokens_max:
            limited.append(part)
        else:
            halves = split(part, 0.5, model)
            if not all(halves):
                halves = split(part, 0.5, TOKENS)
            limited += _limited(halves, model, tokens_max)
    return limited


def _tokens(pieces: Iterable[Piece[Key]]) -> int:
    return sum(piece.tokens for piece in pieces)
