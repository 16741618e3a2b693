"""Least squares with coefficients ≥ 0."""

from collections.abc import Sequence
from math import sqrt

RIDGE = 1e-9
"""Relative addition to the diagonal, without which rounding may make the matrix singular."""

TOLERANCE = 1e-12
"""A slope of the error along a unit column counts as 0 below this fraction of the target's norm."""


def solve_nonnegative(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises |rows · x − target|², by the active-set method (NNLS).

    Columns are first scaled to unit length, so that the units of the coefficients do not matter. A
    column of zeros gets x = 0, and so does a linear combination of columns already in use.
    """
    norms = [sqrt(sum(value * value for value in column)) for column in zip(*rows, strict=True)]
    unit = [[v / n if n else 0.0 for v, n in zip(row, norms, strict=True)] for row in rows]
    size = len(norms)
    solution = [0.0] * size
    passive: list[int] = []  # columns in use: their coefficients are above 0
    rejected: set[int] = set()  # columns that cannot reduce the error further
    threshold = TOLERANCE * sqrt(sum(value * value for value in target))
    # Lawson-Hanson: add the column along which the error falls most steeply, until none is left.
    while True:
        slopes = _slopes(unit, target, solution)
        idle = [i for i in range(size) if i not in passive and i not in rejected]
        entering = max(idle, key=lambda i: slopes[i], default=None)
        if entering is None or slopes[entering] <= threshold:
            return [x / n if n else 0.0 for x, n in zip(solution, norms, strict=True)]
        candidate = _restricted(unit, target, [*passive, entering])
        if candidate is None or candidate[-1] <= 0:
            # The column depends on those in use, or its slope is a rounding error.
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
    """Move `solution` to the optimum over `passive`; removes columns that would be negative."""
    while passive:
        candidate = _restricted(unit, target, passive)
        if candidate is None:
            return
        negative = [(i, x) for i, x in zip(passive, candidate, strict=True) if x <= 0]
        # Go towards the optimum only until the first coefficient reaches 0.
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
    """Half of the descent of the squared error along each column (the negative gradient)."""
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
    """Least-squares solution over `columns`, by modified Gram-Schmidt; None if dependent."""
    basis: list[list[float]] = []
    upper: list[list[float]] = []
    for index in columns:
        vector = [row[index] for row in unit]
        projections = []
        for direction in basis:
            share = sum(a * b for a, b in zip(direction, vector, strict=True))
            projections.append(share)
            vector = [v - share * a for v, a in zip(vector, direction, strict=True)]
        length = sqrt(sum(v * v for v in vector))
        if length < 1e-10:
            return None
        basis.append([v / length for v in vector])
        upper.append([*projections, length])
    # Project the target onto the basis, then solve the triangular system backwards.
    rest = list(target)
    heights = []
    for direction in basis:
        share = sum(a * b for a, b in zip(direction, rest, strict=True))
        heights.append(share)
        rest = [r - share * a for r, a in zip(rest, direction, strict=True)]
    solution = [0.0] * len(columns)
    for index in reversed(range(len(columns))):
        known = sum(
            upper[later][index] * solution[later] for later in range(index + 1, len(columns))
        )
        solution[index] = (heights[index] - known) / upper[index][index]
    return solution


def solve_normal(matrix: list[list[float]], target: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises xᵀ·matrix·x − 2·target·x, for a positive semi-definite matrix."""
    # With matrix = L·Lᵀ, this is |Lᵀ·x − L⁻¹·target|².
    size = len(target)
    lower = [[0.0] * size for _ in range(size)]
    reduced = [0.0] * size
    for i in range(size):
        for j in range(i):
            inner = sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = (matrix[i][j] - inner) / lower[j][j] if lower[j][j] else 0.0
        rest = matrix[i][i] * (1 + RIDGE) - sum(value * value for value in lower[i][:i])
        lower[i][i] = sqrt(max(0.0, rest))
        known = sum(lower[i][k] * reduced[k] for k in range(i))
        reduced[i] = (target[i] - known) / lower[i][i] if lower[i][i] else 0.0
    upper = [[lower[column][row] for column in range(size)] for row in range(size)]
    return solve_nonnegative(upper, reduced)
