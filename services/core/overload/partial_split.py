"""Partial splits: a merged group becomes several smaller groups, at least one of them merged.

A group with S equal members can split into single workers only if its KV in use fits into one of
them with all layers, since each member stores the KV of all requests until it is exchanged after
the split. That is a fraction 1/S of the undropped capacity. Members of larger groups hold fewer
layers, so a split into fewer groups (*parts*) is possible at higher demand (KunServe §4.4).

Parts interleave: stages i, i + parts, i + 2 * parts, ... become a group, and each member keeps its
layers. With neighbours instead, a stage could grow on one side only.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from services.core.groups.layer_map import (
    MemberMemory,
    ModelShape,
    SplitError,
    Stage,
    capacity_tokens,
    grow_stages,
)
from services.core.groups.vocabulary import Group, Targets
from services.core.overload.events import PartialSplit
from services.core.overload.worker_facts import WorkerFacts


class _Member(NamedTuple):
    """A member's memory and present layers."""

    arena_bytes: int
    chunk_bytes: int
    block_size: int
    unmerged_tokens: int
    first_layer: int
    end_layer: int


def partial_targets(group: Group, facts: Mapping[str, WorkerFacts], parts: int) -> Targets:
    """The groups of a partial split into `parts` groups.

    Raises:
        SplitError: if the parameters do not fit.
    """
    shape, members = _members_of(group, facts)
    names = [member.worker_id for member in group.members]
    return tuple(
        tuple(
            Stage(name, stage.first_layer, stage.end_layer)
            for name, stage in zip(names[first::parts], stages, strict=True)
        )
        for first, (stages, _) in enumerate(_divide(shape, members, parts))
    )


def partial_splits_of(
    group: Group, facts: Mapping[str, WorkerFacts]
) -> tuple[tuple[PartialSplit, ...], str]:
    """The partial splits of a group that need less memory than single workers, most parts first.

    If there are none, also returns why, as a clause.
    """
    if len(group.members) < 3:
        return (), ""
    try:
        shape, members = _members_of(group, facts)
    except SplitError as error:
        return (), str(error)
    return _partial_splits(shape, members)


def _members_of(
    group: Group, facts: Mapping[str, WorkerFacts]
) -> tuple[ModelShape, tuple[_Member, ...]]:
    known = [(facts.get(member.worker_id), member) for member in group.members]
    shape = next((worker.shape for worker, _ in known if worker and worker.shape), None)
    if shape is None or not all(worker for worker, _ in known):
        raise SplitError("the sizes of its model are unknown")
    return shape, tuple(
        _Member(
            worker.arena_bytes,
            worker.chunk_bytes,
            worker.block_size,
            worker.kv_blocks_total * worker.block_size,
            member.first_layer,
            member.end_layer,
        )
        for worker, member in known
        if worker is not None
    )


SPLITS_MAX = 4096
"""Groups whose partial splits are kept: more than 10,000 workers can form groups of three."""


# Every evaluation of reports needs them for every group, and to compute them takes milliseconds.
@lru_cache(maxsize=SPLITS_MAX)
def _partial_splits(
    shape: ModelShape, members: tuple[_Member, ...]
) -> tuple[tuple[PartialSplit, ...], str]:
    splits: list[PartialSplit] = []
    refusal = "split into fewer groups, a member would need as much memory"
    limit = min(member.unmerged_tokens for member in members)
    for parts in range(len(members) - 1, 1, -1):
        try:
            tokens = [tokens for _, tokens in _divide(shape, members, parts)]
        except SplitError as error:
            refusal = str(error)
            continue
        if min(tokens) > limit:
            limit = min(tokens)
            splits.append(PartialSplit(parts, limit, sum(tokens)))
    return tuple(splits), "" if splits else refusal


def _divide(
    shape: ModelShape, members: Sequence[_Member], parts: int
) -> list[tuple[tuple[Stage, ...], int]]:
    """Stages and KV capacity in tokens of each part. Raises SplitError."""
    return [_part(shape, members[first::parts]) for first in range(parts)]


def _part(shape: ModelShape, members: Sequence[_Member]) -> tuple[tuple[Stage, ...], int]:
    memories = [MemberMemory("", member.arena_bytes, member.chunk_bytes) for member in members]
    present = [Stage("", member.first_layer, member.end_layer) for member in members]
    stages = grow_stages(shape, memories, present)
    tokens = []
    for member, memory, part in zip(
        members, memories, capacity_tokens(shape, memories, stages), strict=True
    ):
        # A worker may have less KV than its memory allows; scale by what it has with all layers.
        whole = Stage("", 0, shape.num_layers)
        (ideal,) = capacity_tokens(shape, [memory], [whole])
        ideal -= ideal % member.block_size
        whole_blocks = part - part % member.block_size
        tokens.append(whole_blocks * min(member.unmerged_tokens, ideal) // max(1, ideal))
    return stages, min(tokens)
