"""Formation of a round, compared with brute force, and even distribution of decodes."""

import random
from collections import deque
from collections.abc import Iterator
from itertools import product

import pytest

from services.core.cost.model import TOKEN_COSTS, Coefficients, CostModel
from services.core.planner.lookahead import (
    STAGE_PARTS_MAX,
    Piece,
    batch_cost,
    decodes_to_run,
    form_round,
    marginal,
    round_cost,
)

QUADRATIC = CostModel(alpha=0.4, beta=1.0, gamma=1.2, lam=1.0)
LINEAR = CostModel(alpha=0.0, beta=1.0, gamma=0.0, lam=0.0)
LAUNCH_BOUND = CostModel(alpha=0.02, beta=0.2, gamma=6.1, lam=6.0)
A100 = CostModel(
    5.2513e-09, 1.4115e-04, 1.9174e-02, 1.9154e-02, Coefficients(1.2053e-07, 0.0, 1.9174e-02), 1e-7
)
MODELS = {"quadratic": QUADRATIC, "linear": LINEAR, "launch-bound": LAUNCH_BOUND}
WORST_RATIO = 1.2
"""Bound on the heuristic's round cost over the best; measured: 1.18 quadratic, 1.13, 1.00."""


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to distribute `total` tokens over `parts` microbatches, including empty ones."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def best_round(pieces: list[Piece[str]], model: CostModel, parts_max: int) -> float:
    """The cheapest round of two stages over every chunking of every request in order."""
    best = float("inf")
    for parts in range(1, parts_max + 1):
        for dealt in product(*(compositions(piece.tokens, parts) for piece in pieces)):
            batches: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
            for piece, counts in zip(pieces, dealt, strict=True):
                prefix = piece.prefix
                for batch, count in zip(batches, counts, strict=True):
                    if count:
                        batch.append((prefix, count))
                        prefix += count
            costs = [model.batch_s(batch) for batch in batches if batch]
            best = min(best, round_cost(costs))
    return best


def random_pieces(rng: random.Random, requests: int, tokens_max: int) -> list[Piece[str]]:
    return [
        Piece(f"r{n}", rng.choice([0, 0, 3, 20]), rng.randint(1, tokens_max))
        for n in range(requests)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_rounds_are_close_to_optimal(name: str) -> None:
    model, worst = MODELS[name], 1.0
    for seed in range(60):
        rng = random.Random(seed)
        pieces = random_pieces(rng, *rng.choice([(1, 10), (2, 6), (3, 4)]))
        tokens = sum(piece.tokens for piece in pieces)
        formed = form_round(pieces, 2, model, tokens_min=max(1, tokens // 3), tokens_max=100)
        cost = round_cost([batch_cost(model, part) for part in formed])
        best = best_round(pieces, model, parts_max=max(4, len(formed)))
        worst = max(worst, cost / best)
    assert worst <= WORST_RATIO, worst


@pytest.mark.parametrize("seed", range(40))
def test_everything_runs_once_in_order_within_bounds(seed: int) -> None:
    rng = random.Random(seed)
    pieces = random_pieces(rng, rng.randint(0, 12), 300)
    model = rng.choice([*MODELS.values(), TOKEN_COSTS, A100, CostModel(0.0, 0.0, 0.0, 0.0)])
    stages, tokens_max = rng.randint(2, 4), rng.choice([1, 20, 100, 5000])
    tokens_min = rng.choice([1, 16, 128])
    formed = form_round(pieces, stages, model, tokens_min, tokens_max)
    seen: dict[str, int] = {piece.key: piece.prefix for piece in pieces}
    for part in formed:
        assert 0 < sum(piece.tokens for piece in part) <= tokens_max
        assert len({piece.key for piece in part}) == len(part)
        for piece in part:
            assert piece.prefix == seen[piece.key] and piece.tokens > 0
            seen[piece.key] += piece.tokens
    assert seen == {piece.key: piece.prefix + piece.tokens for piece in pieces}
    if model is TOKEN_COSTS and sum(piece.tokens for piece in pieces) > stages * tokens_min:
        assert len(formed) >= stages, "a pipeline wants something in every stage"


@pytest.mark.parametrize("stages", [2, 3])
def test_parts_cost_the_same_where_tokens_do_not(stages: int) -> None:
    """A long prompt: its last tokens cost more than its first."""
    pieces = [Piece("long", 0, 8000), Piece("short", 0, 300)]
    parts = form_round(pieces, stages, A100, tokens_min=256, tokens_max=4096)
    costs = [batch_cost(A100, part) for part in parts]
    assert len(parts) >= stages and max(costs) / min(costs) < 1.01
    first, *_, before_last, _ = parts
    assert first[0].tokens > 1.15 * before_last[0].tokens


def test_a_part_is_full_or_costs_as_much_as_the_largest() -> None:
    """The second prompt costs more per token, so that the first fills the budget of its parts."""
    pieces = [Piece("long", 0, 4000), Piece("longer", 6000, 4000)]
    formed = form_round(pieces, 2, A100, tokens_min=128, tokens_max=512, base=0.03)
    costs = [batch_cost(A100, part) for part in formed]
    full = [sum(piece.tokens for piece in part) == 512 for part in formed]
    assert any(full) and not all(full[:-1])
    for is_full, cost in list(zip(full, costs, strict=True))[:-1]:
        assert is_full or cost > 0.99 * max(costs)
    assert len(formed) <= 8000 / 512 * 1.25


def test_few_tokens_are_not_split_needlessly() -> None:
    pieces = [Piece("a", 0, 40), Piece("b", 0, 60)]
    assert form_round(pieces, 2, TOKEN_COSTS, tokens_min=51, tokens_max=4096) == [pieces]
    assert len(form_round(pieces, 2, TOKEN_COSTS, tokens_min=50, tokens_max=4096)) == 2
    assert len(form_round(pieces, 2, TOKEN_COSTS, tokens_min=1, tokens_max=4096)) > 16
    assert len(form_round(pieces, 2, LAUNCH_BOUND, tokens_min=1, tokens_max=4096)) == 4
    assert form_round([], 2, TOKEN_COSTS, 1, 1) == []


@pytest.mark.parametrize("stages", [2, 4])
def test_a_model_without_fixed_costs_bounds_the_number_of_parts(stages: int) -> None:
    for pieces in ([Piece(n, 0, 1000) for n in range(32)], [Piece(n, 0, 40) for n in range(800)]):
        formed = form_round(pieces, stages, LINEAR, tokens_min=1, tokens_max=2048)
        assert 8 * stages < len(formed) <= STAGE_PARTS_MAX * stages
    needed = form_round([Piece("long", 0, 3000)], stages, LINEAR, tokens_min=1, tokens_max=10)
    assert len(needed) == 300, "the token budget requires more parts"


def test_cost_of_a_round_in_lockstep() -> None:
    assert round_cost([]) == 0
    assert round_cost([3.0]) == 6.0
    assert round_cost([1.0, 2.0, 1.0]) == 1.0 + (2.0 + 2.0) + 1.0
    assert round_cost([1.0, 2.0, 1.0], stages=3) == 1.0 + 2.0 * 3 + 1.0


def test_the_cost_of_a_chunk_excludes_shared_costs() -> None:
    chunks = [(0, 5), (7, 1), (3, 4)]
    alone = sum(marginal(QUADRATIC, *chunk) for chunk in chunks)
    assert alone + QUADRATIC.lam == pytest.approx(QUADRATIC.batch_s(chunks))
    assert marginal(QUADRATIC, 9, 0) == 0


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("sequences", [1, 2, 3, 7, 8, 100])
def test_decodes_are_dealt_evenly_and_stay_so(stages: int, sequences: int) -> None:
    ready = list(range(sequences))
    cost = {sequence: 1.0 for sequence in ready}
    in_flight: deque[list[int]] = deque()
    sizes: list[int] = []
    last_turn = dict.fromkeys(ready, 0)
    for turn in range(200):
        if len(in_flight) == stages:
            ready += in_flight.popleft()
        if turn == 100 and sequences > stages:
            for gone in ready[: len(ready) // 2]:
                ready.remove(gone)
                del last_turn[gone]
        count = decodes_to_run(
            [cost[sequence] for sequence in ready],
            [sum(cost[sequence] for sequence in plan) for plan in in_flight],
            stages,
        )
        in_flight.append([ready.pop(0) for _ in range(count)])
        for sequence in in_flight[-1]:
            assert turn - last_turn[sequence] <= 2 * stages, "it waits too long"
            last_turn[sequence] = turn
        sizes.append(count)
    settled = sizes[-stages:]
    assert sum(settled) == len(last_turn), "in every round, each decodes once"
    assert max(settled) - min(settled) <= 1
    before = sizes[100 - stages : 100]
    assert sum(before) == sequences and max(before) - min(before) <= 1


def test_uneven_costs_are_dealt_by_cost() -> None:
    rng = random.Random(3)
    costs = [rng.choice([1.0, 1.0, 5.0]) for _ in range(60)]
    ready, in_flight = list(costs), deque()
    for _ in range(60):
        if len(in_flight) == 2:
            ready += in_flight.popleft()
        count = decodes_to_run(ready, [sum(plan) for plan in in_flight], 2)
        in_flight.append([ready.pop(0) for _ in range(count)])
    first, second = (sum(plan) for plan in in_flight)
    assert first + second == sum(costs) and abs(first - second) <= 5.0
