"""The best tokens of a row of logits, without a sort.

Token i lies in *lane* i modulo `LANES`. Each of the best `count` peaks of lanes is a token, so the
best `count` tokens of the row are not below the least of these peaks: to find them, the row is read
twice, and few tokens are compared with each other. For kernels only.

A token is better than another if its value is higher, or if it is equal and its id is lower.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

LANES = 256
_STEP = 64


class Scratch(NamedTuple):
    """Memory for the tokens of one row: at most 20 bytes for each token of the vocabulary."""

    lanes: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, vocab_size: int, dtype: npt.DTypeLike) -> "Scratch":
        """For logits in `dtype`, float32 or float64."""
        room = max(vocab_size, LANES)
        return cls(
            np.empty(LANES, dtype), np.empty(room, np.int32), np.empty(room, dtype), np.empty(room)
        )

    @property
    def dtype(self) -> str:
        """The name of the type of the logits."""
        return str(self.values.dtype.name)

    def check(self, logits: np.ndarray) -> None:
        """Raise ValueError for logits [rows, vocab] that kernels cannot read with this scratch."""
        if logits.dtype != self.values.dtype or logits.shape[1] > len(self.ids):
            raise ValueError(
                f"logits {logits.shape} in {logits.dtype} do not fit scratch for {len(self.ids)}"
                f" tokens in {self.dtype}"
            )


@register_jitable
def lane_peaks(row, lanes):  # type: ignore[no-untyped-def]
    """Fill `lanes` [LANES] with the largest value of each; returns the largest of all.

    What is not a number counts as minus infinity.
    """
    size = len(row)
    lanes[:] = -np.inf
    for begin in range(0, size, LANES):
        part = row[begin : begin + LANES]
        for lane in range(len(part)):
            value = part[lane]
            lanes[lane] = value if value > lanes[lane] else lanes[lane]
    peak = lanes[0]
    for lane in range(1, LANES):
        peak = max(peak, lanes[lane])
    return peak


@register_jitable
def best_token(row, lanes, peak):  # type: ignore[no-untyped-def]
    """The lowest id that has the value `peak`; 0 if none has."""
    size = len(row)
    best = size
    for lane in range(min(LANES, size)):
        if lanes[lane] == peak:
            token = lane
            while token < best and row[token] != peak:
                token += LANES
            best = min(best, token)
    return best if best < size else 0


@register_jitable
def lane_edge(lanes, count, ids, values, weights):  # type: ignore[no-untyped-def]
    """A value that at least `count` tokens of the row reach; minus infinity if none is known.

    It overwrites the first `LANES` of `ids`, `values` and `weights`.
    """
    if count > LANES:
        return lanes[0] - np.inf
    for lane in range(LANES):
        ids[lane], values[lane], weights[lane] = lane, lanes[lane], 1.0
    lead(ids, values, weights, LANES, float(count), False)
    return values[count - 1]


@register_jitable
def gather(row, edge, ids):  # type: ignore[no-untyped-def]
    """Fill `ids` with the tokens that reach `edge`, in order; returns how many there are."""
    size, count = len(row), 0
    for begin in range(0, size, _STEP):
        part = row[begin : min(begin + _STEP, size)]
        reaching = 0
        for index in range(len(part)):
            reaching += 1 if part[index] >= edge else 0
        if reaching:
            for index in range(len(part)):
                if part[index] >= edge:
                    ids[count] = begin + index
                    count += 1
    return count


@register_jitable
def lead(ids, values, weights, count, target, beyond):  # type: ignore[no-untyped-def]
    """Bring the fewest best of `count` tokens to the front whose weights add up to `target`.

    Returns their number, at least 1; the last of them is the worst of them. If all together do not
    reach `target`, these are all tokens. With `beyond`, the sum must exceed it.
    """
    begin, end, before = 0, count, 0.0
    while end - begin > 1:
        place, better = _split(ids, values, weights, begin, end)
        mass = before + better
        if mass > target or (mass == target and not beyond):
            end = place
            continue
        mass += weights[place]
        if mass > target or (mass == target and not beyond):
            return place + 1
        begin, before = place + 1, mass
    return max(end, 1)


@register_jitable
def _split(ids, values, weights, begin, end):  # type: ignore[no-untyped-def]
    """Choose a token of this range; bring those that are better before it, and others behind it.

    Returns its place, and the sum of the weights of those before it.
    """
    last = end - 1
    _swap(ids, values, weights, (begin + end) // 2, last)
    token, value = ids[last], values[last]
    place, better = begin, 0.0
    for index in range(begin, last):
        if values[index] > value or (values[index] == value and ids[index] < token):
            better += weights[index]
            _swap(ids, values, weights, index, place)
            place += 1
    _swap(ids, values, weights, place, last)
    return place, better


@register_jitable
def _swap(ids, values, weights, one, other):  # type: ignore[no-untyped-def]
    ids[one], ids[other] = ids[other], ids[one]
    values[one], values[other] = values[other], values[one]
    weights[one], weights[other] = weights[other], weights[one]
