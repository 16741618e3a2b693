"""Which layers each stage of a pipeline runs: contiguous runs, by memory first and then by time.

The embedding stays at the first stage, final norm and head at the last; a tied embedding is read
at both ends, so it stays at both (it is 21 % of SmolLM2). KunServe §4.1 divides layers evenly. That
wastes memory when the ends keep much or the members' memory differs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain

from services.core.setting import number, option


class SplitError(ValueError):
    """The layers cannot be divided among these members; one sentence of cause and remedy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model as a worker holds it.

    Bytes are of whole chunks of the arena. `head_bytes` holds the final norm and the LM head, of
    which a tied one has no weight of its own. `kv_bytes` is K and V of one token in one layer.
    `layer_cost`, `embedding_cost` and `head_cost` are times of a pass in any one unit: only their
    ratios matter.
    """

    num_layers: int = number(minimum=1, maximum=10**6)
    layer_bytes: int = number(minimum=1, maximum=2**60)
    embedding_bytes: int = number(minimum=0, maximum=2**60)
    head_bytes: int = number(minimum=0, maximum=2**60)
    tied_embeddings: bool = option()
    kv_bytes: int = number(minimum=1, maximum=2**60)
    layer_cost: float = number(1.0, minimum=1e-12, maximum=2**60)
    embedding_cost: float = number(0.0, minimum=0, maximum=2**60)
    head_cost: float = number(0.0, minimum=0, maximum=2**60)

    def kept_bytes(self, first: bool, last: bool) -> int:
        """Parameters that a stage holds beside its layers."""
        embedding = first or (last and self.tied_embeddings)
        return self.embedding_bytes * embedding + self.head_bytes * last

    def parameter_bytes(self, stages: int) -> int:
        """Parameters that a group of `stages` members holds, all of them together."""
        copies = 2 if self.tied_embeddings and stages > 1 else 1
        kept = copies * self.embedding_bytes + self.head_bytes
        return self.num_layers * self.layer_bytes + kept

    def time_share(self, stage: "Stage") -> float:
        """The stage's part in the time of a pass through the model."""
        last = stage.end_layer == self.num_layers
        own = self.layer_cost * stage.num_layers + self.head_cost * last
        own += self.embedding_cost * (stage.first_layer == 0)
        return own / (self.layer_cost * self.num_layers + self.embedding_cost + self.head_cost)

    def freed_bytes(self, left: int, right: int) -> int:
        """What a merge of groups of `left` and `right` stages frees: the copy that both hold."""
        apart = self.parameter_bytes(left) + self.parameter_bytes(right)
        return apart - self.parameter_bytes(left + right)


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """A member and its memory for parameters and KV together."""

    worker_id: str
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A member runs layers `first_layer` to `end_layer` - 1."""

    worker_id: str
    first_layer: int
    end_layer: int

    @property
    def num_layers(self) -> int:
        """How many layers the stage runs; at least one."""
        return self.end_layer - self.first_layer


def serves(stages: Sequence[Stage], num_layers: int) -> bool:
    """Whether the stages have all layers; a group that lost a member has not."""
    return (stages[0].first_layer, stages[-1].end_layer) == (0, num_layers)


def split_layers(
    model: ModelShape, rooms: Sequence[MemberMemory], needed_tokens: int
) -> tuple[Stage, ...]:
    """Contiguous runs of layers for the members in `rooms`, in that order.

    The smallest stage's capacity is made as large as possible until it reaches `needed_tokens`
    tokens of KV; under that condition the slowest stage is made as fast as possible, and then the
    smallest capacity as large as that time allows. Exact: only the counts of layers matter.

    Raises:
        SplitError: if there are more members than layers, or the parameters fit in no way.
    """
    _check(model, rooms)
    frees = _free_bytes(model, rooms)
    slowest = [model.num_layers] * len(rooms)
    tokens = min(max(0, needed_tokens), _most_tokens(model, frees, slowest))
    within = _within_time(model, _most_layers(model, frees, tokens))
    tokens = _most_tokens(model, frees, within)
    counts = _deal(model, _smaller(_most_layers(model, frees, tokens), within))
    return stages_of(rooms, counts)


def stages_of(rooms: Sequence[MemberMemory], counts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of workers that run so many layers each, in this order."""
    stages, first = [], 0
    for room, count in zip(rooms, counts, strict=True):
        stages.append(Stage(room.worker_id, first, first + count))
        first += count
    return tuple(stages)


def capacity_tokens(
    model: ModelShape, rooms: Sequence[MemberMemory], stages: Sequence[Stage]
) -> tuple[int, ...]:
    """Tokens of KV that each stage has room for; the least of them is the group's capacity.

    A worker grows by whole chunks in every layer, so it may have up to a chunk a layer less.
    """
    return tuple(
        max(0, free - stage.num_layers * model.layer_bytes) // (stage.num_layers * model.kv_bytes)
        for free, stage in zip(_free_bytes(model, rooms), stages, strict=True)
    )


def _check(model: ModelShape, rooms: Sequence[MemberMemory]) -> None:
    if not rooms:
        raise SplitError("a group has no members; name at least one")
    if len(rooms) > model.num_layers:
        raise SplitError(
            f"{len(rooms)} members cannot share {model.num_layers} layers, as each runs at least "
            f"one; merge at most {model.num_layers}"
        )


def _free_bytes(model: ModelShape, rooms: Sequence[MemberMemory]) -> list[int]:
    """The memory that each member has left for layers and their KV."""
    last = len(rooms) - 1
    return [
        room.arena_bytes - model.kept_bytes(index == 0, index == last)
        for index, room in enumerate(rooms)
    ]


def _most_layers(model: ModelShape, frees: Sequence[int], tokens: int) -> list[int]:
    """Most layers that each member holds with KV of `tokens` tokens in them."""
    each = model.layer_bytes + tokens * model.kv_bytes
    return [min(model.num_layers, free // each) for free in frees]


def _smaller(ones: Sequence[int], others: Sequence[int]) -> list[int]:
    """The smaller limit of each member."""
    return list(map(min, ones, others))


def _suffice(model: ModelShape, counts: Sequence[int]) -> bool:
    """Whether members that take up to `counts` layers can share all of them."""
    return min(counts) >= 1 and sum(counts) >= model.num_layers


def _most_tokens(model: ModelShape, frees: Sequence[int], limits: Sequence[int]) -> int:
    """Largest capacity of the smallest stage when member i takes at most `limits[i]` layers.

    Raises SplitError.
    """

    def fits(tokens: int) -> bool:
        return _suffice(model, _smaller(_most_layers(model, frees, tokens), limits))

    if not fits(0):
        raise SplitError(
            f"the parameters do not fit into the memory of {len(frees)} members; give the workers "
            "more memory"
        )
    # The member with most room can run nothing but one layer.
    low, high = 0, max(frees) // model.kv_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _extra_costs(model: ModelShape, stages: int) -> list[float]:
    """Time of each stage beside its layers."""
    extra = [0.0] * stages
    extra[0] += model.embedding_cost
    extra[-1] += model.head_cost
    return extra


def _within_time(model: ModelShape, limits: Sequence[int]) -> list[int]:
    """The limits on layers that the smallest time of the slowest stage leaves.

    `limits` suffice; so does the result.
    """
    # The time of 1, 2, … layers at each member. The slowest stage's time is one of all these, so
    # floats are only compared with themselves.
    times = [
        [extra + count * model.layer_cost for count in range(1, limit + 1)]
        for extra, limit in zip(_extra_costs(model, len(limits)), limits, strict=True)
    ]

    def counts_within(time: float) -> list[int]:
        return [bisect_right(own, time) for own in times]

    choices = sorted(set(chain.from_iterable(times)))
    best = bisect_left(choices, True, key=lambda time: _suffice(model, counts_within(time)))
    return counts_within(choices[best])


def _deal(model: ModelShape, limits: Sequence[int]) -> list[int]:
    """Layers for each member within limits that suffice; each next one goes to the least busy."""
    extra = _extra_costs(model, len(limits))
    counts = [1] * len(limits)
    heap = [(extra[index] + model.layer_cost, index) for index in range(len(limits))]
    heapify(heap)
    left = model.num_layers - len(limits)
    while left:
        cost, index = heap[0]
        if counts[index] == limits[index]:
            heapreplace(heap, (float("inf"), index))
            continue
        counts[index] += 1
        left -= 1
        heapreplace(heap, (cost + model.layer_cost, index))
    return counts
