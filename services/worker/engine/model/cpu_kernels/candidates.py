"""Selects the best tokens of a row of logits without a sort; the functions are called from kernels.

Token i belongs to *lane* i modulo `LANES`. Each lane's maximum is the logit of a token, so at least
`count` tokens reach the `count`-th largest maximum. A first pass computes the maxima, a second pass
gathers the few tokens that reach this bound, and quickselect selects the best of them.

A token is better than another if its value is higher, or if the values are equal and its id is
lower. The *mass* of tokens is the sum of their weights.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

LANES = 256
_STEP = 64


class Scratch(NamedTuple):
    """Scratch memory for the candidates of a row: at most 20 bytes per token of the vocabulary."""

    lanes: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, vocab_size: int, dtype: npt.DTypeLike) -> "Scratch":
        """Allocate scratch for logits in `dtype`, float32 or float64."""
        room = max(vocab_size, LANES)
        return cls(
            np.empty(LANES, dtype), np.empty(room, np.int32), np.empty(room, dtype), np.empty(room)
        )

    @property
    def dtype(self) -> str:
        """The name of the logits' dtype."""
        return str(self.values.dtype.name)

    def check(self, logits: np.ndarray) -> None:
        """Raise ValueError if logits [rows, vocab] do not match this scratch."""
        if logits.dtype != self.values.dtype or logits.shape[1] > len(self.ids):
            raise ValueError(
                f"logits {logits.shape} in {logits.dtype} do not match scratch for {len(self.ids)}"
                f" tokens in {self.dtype}"
            )


@register_jitable
def lane_peaks(row, lanes):  # type: ignore[no-untyped-def]
    """Fill `lanes` [LANES] with the maximum of each lane; returns the maximum of the row.

    NaN counts as minus infinity.
    """
    size = len(row)
    lanes[:] = -np.inf
    for begin in range(0, size, LANES):
        part = row[begin : begin + LANES]
        for lane in range(len(part)):
            value = part[lane]
            # Compare instead of calling `max`: a comparison is False for NaN, and it vectorizes.
            lanes[lane] = value if value > lanes[lane] else lanes[lane]
    peak = lanes[0]
    for lane in range(1, LANES):
        peak = max(peak, lanes[lane])
    return peak


@register_jitable
def best_token(row, lanes, peak):  # type: ignore[no-untyped-def]
    """Return the lowest id with the value `peak`; 0 if there is none (a row of NaN)."""
    # Search only the lanes whose maximum is `peak`, each up to the best id so far.
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
def lane_threshold(lanes, count, ids, values, weights):  # type: ignore[no-untyped-def]
    """Return the `count`-th largest maximum, which at least `count` tokens of the row reach.

    Minus infinity if `count` exceeds `LANES`. Overwrites the first `LANES` entries of `ids`,
    `values` and `weights`.
    """
    if count > LANES:
        return lanes[0] - np.inf
    # With unit weights, quickselect by mass is quickselect by rank.
    for lane in range(LANES):
        ids[lane], values[lane], weights[lane] = lane, lanes[lane], 1.0
    select_prefix(ids, values, weights, LANES, float(count), False)
    return values[count - 1]


@register_jitable
def gather(row, threshold, ids):  # type: ignore[no-untyped-def]
    """Fill `ids` with the tokens whose logit reaches `threshold`, in order; returns the count."""
    size, count = len(row), 0
    for begin in range(0, size, _STEP):
        part = row[begin : min(begin + _STEP, size)]
        # Count in a vectorized loop first, because most steps have no candidate.
        reaching = 0
        for index in range(len(part)):
            reaching += 1 if part[index] >= threshold else 0
        if reaching:
            for index in range(len(part)):
                if part[index] >= threshold:
                    ids[count] = begin + index
                    count += 1
    return count


@register_jitable
def select_prefix(ids, values, weights, count, target, beyond):  # type: ignore[no-untyped-def]
    """Move the fewest best of `count` tokens whose mass reaches `target` to the front.

    Returns their number, at least 1; the last of them is the worst. If the total mass is less than
    `target`, these are all tokens. With `beyond`, the mass must exceed `target`.
    """
    # Weighted quickselect: narrow [begin, end) to the boundary; `before` is the mass before it.
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
    """Partition a range by its middle token (the pivot), better tokens first.

    Returns the index of the pivot, and the mass of the better tokens in the range.
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
def _swap(ids, values, weights, first, second):  # type: ignore[no-untyped-def]
    ids[first], ids[second] = ids[second], ids[first]
    values[first], values[second] = values[second], values[first]
    weights[first], weights[second] = weights[second], weights[first]
