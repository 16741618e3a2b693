"""Computes the layer map of a merged group: contiguous layers for each member (stage).

Memory has priority over speed. The first stage holds the embedding, the last stage the final norm
and the LM head. If the head is tied to the embedding, both stages hold the embedding (21 % of
SmolLM2's parameters). KunServe §4.1 divides layers evenly, which wastes memory if embedding and
head are large, or members have different amounts of memory. The *arena* is a worker's memory for
parameters and KV.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heapreplace
from itertools import chain

from services.core.setting import number, option


class SplitError(ValueError):
    """The layers cannot be divided among these members; the message has cause and remedy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and costs of a model as loaded by a worker.

    Bytes of parameters are rounded up to arena chunks. `head_bytes` covers the final norm and the
    LM head, without the weight of a tied head. `kv_bytes` is K and V of a token in a layer.
    `layer_cost`, `embedding_cost` and `head_cost` are forward times; only their ratios matter.
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
        """Bytes of parameters that a stage holds besides its layers: embedding and head."""
        embedding = first or (last and self.tied_embeddings)
        return self.embedding_bytes * embedding + self.head_bytes * last

    def parameter_bytes(self, stages: int) -> int:
        """Bytes of parameters that a group of `stages` members holds in total."""
        copies = 2 if self.tied_embeddings and stages > 1 else 1
        kept = copies * self.embedding_bytes + self.head_bytes
        return self.num_layers * self.layer_bytes + kept

    def time_share(self, stage: "Stage") -> float:
        """The stage's fraction of the time of a forward pass."""
        last = stage.end_layer == self.num_layers
        own = self.layer_cost * stage.num_layers + self.head_cost * last
        own += self.embedding_cost * (stage.first_layer == 0)
        return own / (self.layer_cost * self.num_layers + self.embedding_cost + self.head_cost)

    def freed_bytes(self, left: int, right: int) -> int:
        """Bytes of duplicate parameters that a merge of groups of these stage counts frees."""
        apart = self.parameter_bytes(left) + self.parameter_bytes(right)
        return apart - self.parameter_bytes(left + right)


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """A member and its arena, which holds parameters and KV of a layer in whole chunks."""

    worker_id: str
    arena_bytes: int
    chunk_bytes: int = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """A member's layers, `first_layer` to `end_layer` - 1."""

    worker_id: str
    first_layer: int
    end_layer: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.end_layer - self.first_layer


def serves(stages: Sequence[Stage], num_layers: int) -> bool:
    """Whether the stages have all layers; false for a survivor of a lost member."""
    return (stages[0].first_layer, stages[-1].end_layer) == (0, num_layers)


def split_layers(
    model: ModelShape, members: Sequence[MemberMemory], needed_tokens: int
) -> tuple[Stage, ...]:
    """Divide the layers among `members`, in that order.

    The group's capacity is the number of tokens whose KV fits at every stage. Three objectives, in
    order of priority: the capacity is `needed_tokens`, or as close to it as possible; the slowest
    stage is as fast as possible; the capacity is as large as that time allows. The solution is
    optimal, since each objective depends only on the layer counts.

    Raises:
        SplitError: if there are more members than layers, or the parameters do not fit.
    """
    _check(model, members)
    free_bytes = _free_bytes(model, members)
    covers = partial(_can_cover, model)
    # Objective 1: the capacity that memory alone allows, capped at the need.
    unlimited = [model.num_layers] * len(members)
    tokens = min(max(0, needed_tokens), _most_tokens(model, free_bytes, unlimited, covers))
    # Objective 2: the shortest time of the slowest stage at that capacity.
    limits = _limits_for_fastest(model, _most_layers(model, free_bytes, tokens), covers)
    # Objective 3: the largest capacity at that time.
    tokens = _most_tokens(model, free_bytes, limits, covers)
    counts = _assign_layers(model, _minima(_most_layers(model, free_bytes, tokens), limits))
    return stages_of(members, counts)


def grow_stages(
    model: ModelShape, members: Sequence[MemberMemory], present: Sequence[Stage]
) -> tuple[Stage, ...]:
    """Divide the layers among `members` so that each keeps its `present` layers.

    `present` has the members' stages in a larger group, in pipeline order. The capacity is as large
    as possible, then the slowest stage as fast as possible.

    Raises:
        SplitError: if the parameters do not fit.
    """
    _check(model, members)
    free_bytes = _free_bytes(model, members)
    covers = partial(_grows_to_cover, model, present)
    unlimited = [model.num_layers] * len(members)
    tokens = _most_tokens(model, free_bytes, unlimited, covers)
    limits = _limits_for_fastest(model, _most_layers(model, free_bytes, tokens), covers)
    ends = _latest_ends(model, present, limits)
    assert ends is not None  # `limits` cover the layers
    return tuple(
        Stage(member.worker_id, first, end)
        for member, first, end in zip(members, [0, *ends], ends, strict=False)
    )


def stages_of(members: Sequence[MemberMemory], counts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of `members` with `counts` layers each, in pipeline order."""
    stages, first = [], 0
    for member, count in zip(members, counts, strict=True):
        stages.append(Stage(member.worker_id, first, first + count))
        first += count
    return tuple(stages)


def capacity_tokens(
    model: ModelShape, members: Sequence[MemberMemory], stages: Sequence[Stage]
) -> tuple[int, ...]:
    """Tokens of KV that fit at each stage; the minimum is the group's capacity.

    An upper bound for members with unknown `chunk_bytes`: up to a chunk per layer may be unused.
    """
    tokens = []
    for free, member, stage in zip(_free_bytes(model, members), members, stages, strict=True):
        kv_bytes = max(0, free - stage.num_layers * model.layer_bytes)
        chunks = kv_bytes // (stage.num_layers * member.chunk_bytes)
        tokens.append(chunks * member.chunk_bytes // model.kv_bytes)
    return tuple(tokens)


def _check(model: ModelShape, members: Sequence[MemberMemory]) -> None:
    if not members:
        raise SplitError("a group has no members; name at least one")
    if len(members) > model.num_layers:
        raise SplitError(
            f"{len(members)} members cannot share {model.num_layers} layers, as each runs at least "
            f"one; merge at most {model.num_layers}"
        )


def _free_bytes(model: ModelShape, members: Sequence[MemberMemory]) -> list[int]:
    """Bytes that each member has for layers and their KV, without embedding and head."""
    last = len(members) - 1
    return [
        member.arena_bytes - model.kept_bytes(index == 0, index == last)
        for index, member in enumerate(members)
    ]


def _most_layers(model: ModelShape, free_bytes: Sequence[int], tokens: int) -> list[int]:
    """Maximum number of layers of each member if each layer has KV of `tokens` tokens."""
    each = model.layer_bytes + tokens * model.kv_bytes
    return [min(model.num_layers, free // each) for free in free_bytes]


def _minima(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Element-wise minimum."""
    return list(map(min, left, right))


def _can_cover(model: ModelShape, counts: Sequence[int]) -> bool:
    """Whether members with at most `counts` layers each can run all layers, at least 1 each."""
    return min(counts) >= 1 and sum(counts) >= model.num_layers


def _latest_ends(
    model: ModelShape, present: Sequence[Stage], counts: Sequence[int]
) -> list[int] | None:
    """The largest end layers of stages with at most `counts` layers that keep `present`.

    None if such stages cannot have all layers.
    """
    # A stage ends where the next stage's present layers begin, or before.
    most_ends = [*(stage.first_layer for stage in present[1:]), model.num_layers]
    ends, end = [], 0
    for stage, count, most_end in zip(present, counts, most_ends, strict=True):
        # The larger the end, the fewer layers remain for the next stages.
        end = min(end + count, most_end)
        if end < stage.end_layer:
            return None
        ends.append(end)
    return ends if end == model.num_layers else None


def _grows_to_cover(model: ModelShape, present: Sequence[Stage], counts: Sequence[int]) -> bool:
    """Whether stages with at most `counts` layers each can keep `present` and have all layers."""
    return _latest_ends(model, present, counts) is not None


_Covers = Callable[[Sequence[int]], bool]
"""Whether members with at most these numbers of layers can run all layers."""


def _most_tokens(
    model: ModelShape, free_bytes: Sequence[int], limits: Sequence[int], covers: _Covers
) -> int:
    """Maximum capacity in tokens if member i runs at most `limits[i]` layers.

    Raises SplitError.
    """

    def fits(tokens: int) -> bool:
        return covers(_minima(_most_layers(model, free_bytes, tokens), limits))

    if not fits(0):
        raise SplitError(
            f"the parameters do not fit into the memory of {len(free_bytes)} members; give the"
            " workers more memory"
        )
    # Binary search. Upper bound: the member with the most memory uses all of it for KV of a single
    # layer.
    low, high = 0, max(free_bytes) // model.kv_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _extra_costs(model: ModelShape, stages: int) -> list[float]:
    """Forward time of each stage besides its layers: embedding and head."""
    extra = [0.0] * stages
    extra[0] += model.embedding_cost
    extra[-1] += model.head_cost
    return extra


def _limits_for_fastest(model: ModelShape, limits: Sequence[int], covers: _Covers) -> list[int]:
    """`limits` lowered to the shortest possible time of the slowest stage; still sufficient."""
    # The time of 1, 2, … layers at each member. The slowest stage's time is one of these values,
    # so a binary search over them is exact: it compares each float only with these values.
    times = [
        [extra + count * model.layer_cost for count in range(1, limit + 1)]
        for extra, limit in zip(_extra_costs(model, len(limits)), limits, strict=True)
    ]

    def counts_within(time: float) -> list[int]:
        return [bisect_right(own, time) for own in times]

    choices = sorted(set(chain.from_iterable(times)))
    best = bisect_left(choices, True, key=lambda time: covers(counts_within(time)))
    return counts_within(choices[best])


def _assign_layers(model: ModelShape, limits: Sequence[int]) -> list[int]:
    """Layer counts within `limits`, which suffice; each layer goes to the least loaded stage."""
    extra = _extra_costs(model, len(limits))
    counts = [1] * len(limits)
    heap = [(extra[index] + model.layer_cost, index) for index in range(len(limits))]
    heapify(heap)
    remaining = model.num_layers - len(limits)
    while remaining:
        cost, index = heap[0]
        # A member at its limit receives no further layer: its key becomes infinite.
        if counts[index] == limits[index]:
            heapreplace(heap, (float("inf"), index))
            continue
        counts[index] += 1
        remaining -= 1
        heapreplace(heap, (cost + model.layer_cost, index))
    return counts
