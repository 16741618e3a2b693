"""Bounds of buckets of similar length, for which padding to a common length costs little.

A batch that is padded computes each request at the length of its longest, so its *padding* is the
sum of the differences (BucketServe §IV, eq. 2-3). Lengths are prompt and expected output tokens. A
bucket ends at its longest request: the paper's optimum (eq. 4), the mean length in the bucket,
minimises squared deviations, and half of the requests would exceed it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

BUCKETS_MAX = 16
"""Maximum number of buckets."""
CELLS = 128
"""Resolution: a cell has at most this fraction of the requests, or a single length, and spans at
most this fraction of the range of lengths. There are at most twice as many cells."""
REFINEMENTS = 16
"""Maximum number of passes that move the bounds."""
SAFE_SHARE = 0.9
"""Share of the free KV memory that the requests of a batch may need (eq. 5)."""
SPLIT_SHARE = 0.5
"""The paper splits a bucket if more than this share of its requests is in the lower half (θ)."""


def batch_size(lengths: Sequence[int], safe_tokens: float) -> int:
    """N_max: number of requests from the first whose lengths fit into `safe_tokens` (eq. 6).

    In tokens, so unlike in the paper the size of a token's KV counts KV heads (grouped-query
    attention), not attention heads.
    """
    for number, total in enumerate(accumulate(lengths)):
        if total > safe_tokens:
            return number
    return len(lengths)


def bucket_of(length: int, bounds: Sequence[int]) -> int:
    """Index of the bucket of a length; requests above the last bound are in the last bucket."""
    return min(bisect_left(bounds, length), max(0, len(bounds) - 1))


def adaptive_bounds(ordered: Sequence[int], safe_tokens: float) -> tuple[int, ...]:
    """The greatest length of each bucket, ascending; `ordered`: sorted lengths of all requests.

    There are as many buckets as batches of `safe_tokens` wait, up to `BUCKETS_MAX`, or fewer if
    there are fewer lengths. Buckets are split where that saves most padding; then bounds move while
    that saves more. O(n + CELLS · buckets · `REFINEMENTS`).
    """
    if not ordered:
        return ()
    cells = _Cells.of(ordered)
    batches = ceil(min(BUCKETS_MAX, cells.tokens[-1] / max(1.0, safe_tokens)))
    cuts = [0, len(cells.uppers)]
    while len(cuts) <= batches and (cut := cells.next_cut(cuts)[1]):
        insort(cuts, cut)
    for _ in range(REFINEMENTS):
        before = list(cuts)
        for index in range(1, len(cuts) - 1):
            cuts[index] = cells.best_cut(cuts[index - 1], cuts[index + 1])[1]
        cells.exchange(cuts)
        if cuts == before:
            break
    return tuple(cells.uppers[cut - 1] for cut in cuts[1:])


@dataclass(frozen=True, slots=True)
class _Cells:
    """Sorted lengths in cells: greatest length of each; before each, requests and their tokens."""

    uppers: list[int]
    requests: list[int]
    tokens: list[int]

    @classmethod
    def of(cls, ordered: Sequence[int]) -> "_Cells":
        """The cells of sorted lengths."""
        uppers, requests, tokens = list[int](), [0], [0]
        count_max, width = len(ordered) / CELLS, (ordered[-1] - ordered[0]) / CELLS
        first, total = 0, 0
        for number, length in enumerate(ordered):
            # Equal lengths share a cell, since no bound separates them.
            if number and length > ordered[number - 1]:
                wide = length - ordered[first] > width
                if wide or number - first >= count_max:
                    uppers.append(ordered[number - 1])
                    requests.append(number)
                    tokens.append(total)
                    first = number
            total += length
        uppers.append(ordered[-1])
        requests.append(len(ordered))
        tokens.append(total)
        return cls(uppers, requests, tokens)

    def saved(self, low: int, cut: int, high: int) -> int:
        """Padding that a cut of the cells from `low` to `high` saves."""
        shorter = self.requests[cut] - self.requests[low]
        return shorter * (self.uppers[high - 1] - self.uppers[cut - 1])

    def best_cut(self, low: int, high: int) -> tuple[int, int]:
        """The padding that the best cut of the cells from `low` to `high` saves, and that cut."""
        uppers, requests = self.uppers, self.requests
        start, top = requests[low], uppers[high - 1]
        return max(
            (
                ((requests[cut] - start) * (top - uppers[cut - 1]), cut)
                for cut in range(low + 1, high)
            ),
            default=(0, 0),
        )

    def next_cut(self, cuts: Sequence[int]) -> tuple[int, int]:
        """The padding that the best further cut saves, and that cut; 0 if there is none."""
        return max(self.best_cut(low, high) for low, high in pairwise(cuts))

    def exchange(self, cuts: list[int]) -> None:
        """Replace the cut that saves least by one that saves more, if there is one."""
        if not (inner := cuts[1:-1]):
            return
        least, cut = min(
            (self.saved(low, cut, high), cut)
            for low, cut, high in zip(cuts[:-2], inner, cuts[2:], strict=True)
        )
        rest = [other for other in cuts if other != cut]
        more, better = self.next_cut(rest)
        if more > least:
            insort(rest, better)
            cuts[:] = rest


def bisected_bounds(
    bounds: Sequence[int], lengths: Sequence[int], safe_tokens: float, length_max: int
) -> tuple[int, ...]:
    """The bounds after a pass of the paper's algorithm 1, which bisects buckets from `bounds`.

    `lengths` are in order of arrival; `length_max` is the greatest possible length. There is a
    single bucket while a batch has all requests. Else each bucket with more than a batch is split
    at its midpoint, if more than half of its requests are shorter: mass in the upper half stays
    together. The paper has no maximum number of buckets.
    """
    whole = (max(length_max, *lengths, 1),)
    batch = batch_size(lengths, safe_tokens)
    if batch == len(lengths):
        return whole
    bounds = bounds or whole
    split = list[int]()
    left = BUCKETS_MAX - len(bounds)
    low = 0
    for index, upper in enumerate(bounds):
        of = [length for length in lengths if bucket_of(length, bounds) == index]
        middle = (low + upper + 1) // 2  # the first length of the upper half
        shorter = sum(length < middle for length in of)
        if left and low < middle <= upper and len(of) > batch and shorter > SPLIT_SHARE * len(of):
            split.append(middle - 1)
            left -= 1
        split.append(upper)
        low = upper + 1
    return tuple(split)
