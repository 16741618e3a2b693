"""Which leader gets which sequence when groups change, and which blocks the leader finds."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Row

from services.core.groups.layer_map import Stage
from services.core.planner.block_ledger import Follower
from services.core.planner.sequence import Sequence


def deal(sequences: Iterable[Sequence], leaders: Iterable[str]) -> list[tuple[Sequence, str]]:
    """Give each sequence of an old leader to one of the new ones, so that blocks are balanced.

    Sequences with most blocks come first, in the order in which they are to be handed over.
    """
    dealt = dict.fromkeys(leaders, 0)
    found = []
    for sequence in sorted(sequences, key=lambda one: (-one.blocks, one.age)):
        leader = min(dealt, key=lambda one: (dealt[one], one))
        dealt[leader] += max(1, sequence.blocks)
        found.append((sequence, leader))
    return found


def followers_of(
    new: Row[Stage], old: Row[Stage], joined: Mapping[str, tuple[int, int]]
) -> tuple[Follower, ...]:
    """The stages after the first one of `new`, for its leader, whose last group was `old`.

    `joined`: blocks that each of them has, and how many of these are in use.
    """
    led = bool(old) and old[0].worker_id == new[0].worker_id
    # Only the leader of their last group has counted their blocks.
    before = {stage.worker_id: number for number, stage in enumerate(old)} if led else {}
    return tuple(
        Follower(*joined[stage.worker_id], before.get(stage.worker_id)) for stage in new[1:]
    )


def absent_stages(new: Iterable[Stage], old: Iterable[Stage]) -> frozenset[int]:
    """Stages of `new` where a sequence that `old` stages held has no blocks yet."""
    holders = {stage.worker_id for stage in old}
    return frozenset(number for number, stage in enumerate(new) if stage.worker_id not in holders)
