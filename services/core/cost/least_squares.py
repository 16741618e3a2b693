"""Non-negative least squares for a handful of unknowns, without a numerical library."""

from collections.abc import Sequence
from math import sqrt

TOLERANCE = 1e-12
"""A smaller slope of the residual along a unit column, relative to the target's length, is none."""


def solve_nonnegative(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises |rows · x − target|² (the active-set method of NNLS).

    Columns are scaled to unit length first, so their sizes do not matter; a column of zeros, or
    one that the others make up already, gets 0.
    """
    norms = [sqrt(sum(value * value for value in column)) for column in zip(*rows, strict=True)]
    unit = [[v / n if n else 0.0 for v, n in zip(row, norms, strict=True)] for row in rows]
    size = len(norms)
    solution = [0.0] * size
    passive: list[int] = []
    rejected: set[int] = set()
    threshold = TOLERANCE * sqrt(sum(value * value for value in target))
    while True:
        slopes = _slopes(unit, target, solution)
        idle = [i for i in range(size) if i not in passive and i not in rejected]
        entering = max(idle, key=lambda i: slopes[i], default=None)
        if entering is None or slopes[entering] <= threshold:
            return [x / n if n else 0.0 for x, n in zip(solution, norms, strict=True)]
        candidate = _restricted(unit, target, [*passive, entering])
        if candidate is None or candidate[-1] <= 0:
            # Rounding, or a column that depends on those in use: it cannot help.
            rejected.add(entering)
            continue
        rejected.clear()
        passive.append(entering)
        _descend(unit, target, solution, passive)


def _descend(
    unit: Sequence[Sequence[float]],
    target: Sequence[float],
    solution: list[float],
    passive: list[int],
) -> None:
    """Move `solution` to the best one over `passive`; columns that would turn negative leave."""
    while passive:
        candidate = _restricted(unit, target, passive)
        if candidate is None:
            return
        negative = [(i, x) for i, x in zip(passive, candidate, strict=True) if x <= 0]
        step = min((solution[i] / (solution[i] - x) for i, x in negative), default=1.0)
        for index, wanted in zip(passive, candidate, strict=True):
            solution[index] += step * (wanted - solution[index])
        if not negative:
            return
        leaving = {i for i, x in negative if solution[i] <= TOLERANCE} or {negative[0][0]}
        for index in leaving:
            solution[index] = 0.0
            passive.remove(index)


def _slopes(
    unit: Sequence[Sequence[float]], target: Sequence[float], solution: Sequence[float]
) -> list[float]:
    """How fast the error falls along each column."""
    residuals = [
        wanted - sum(a * x for a, x in zip(row, solution, strict=True))
        for row, wanted in zip(unit, target, strict=True)
    ]
    return [
        sum(a * r for a, r in zip(column, residuals, strict=True))
        for column in zip(*unit, strict=True)
    ]


def _restricted(
    unit: Sequence[Sequence[float]], target: Sequence[float], columns: Sequence[int]
) -> list[float] | None:
    """Least squares over some columns by modified Gram-Schmidt; None if they are dependent."""
    basis: list[list[float]] = []
    upper: list[list[float]] = []
    for index in columns:
        vector = [row[index] for row in unit]
        projections = []
        for one in basis:
            share = sum(a * b for a, b in zip(one, vector, strict=True))
            projections.append(share)
            vector = [v - share * a for v, a in zip(vector, one, strict=True)]
        length = sqrt(sum(v * v for v in vector))
        if length < 1e-10:
            return None
        basis.append([v / length for v in vector])
        upper.append([*projections, length])
    rest = list(target)
    heights = []
    for one in basis:
        share = sum(a * b for a, b in zip(one, rest, strict=True))
        heights.append(share)
        rest = [r - share * a for r, a in zip(rest, one, strict=True)]
    solution = [0.0] * len(columns)
    for index in reversed(range(len(columns))):
        known = sum(
            upper[later][index] * solution[later] for later in range(index + 1, len(columns))
        )
        solution[index] = (heights[index] - known) / upper[index][index]
    return solution
