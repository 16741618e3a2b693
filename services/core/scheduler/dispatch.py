"""Filters and scores of dispatch: which groups can take a request, and in which order.

Both are small pure functions. `SCORES` lists the scores by name; the option `dispatch` chooses one.
A score depends on the group's load alone; conditions that change with time are filters, so that
`GroupIndex` can keep groups sorted by score. The dispatch `PREFIX` depends on the request as well:
`PrefixRanking` picks, and `kv_share` breaks ties.
"""

from collections.abc import Callable

from services.core.request import admission_blocks
from services.core.scheduler.group_load import GroupLoad

NO_ADDRESSES: frozenset[str] = frozenset()

Score = tuple[float, ...]
ScoreFunction = Callable[[GroupLoad], Score]
RoomFunction = Callable[[GroupLoad], int]


def serves(load: GroupLoad, now_s: float) -> bool:
    """Filter: a fresh load report at this epoch, and no request runs there exclusively."""
    return load.is_fresh(now_s) and not load.is_exclusive(now_s)


def could_hold(load: GroupLoad, prompt_tokens: int, max_tokens: int) -> bool:
    """Filter: the whole sequence fits into the group's KV cache if it runs there alone."""
    return prompt_tokens + max_tokens <= load.tokens_max


def start_blocks(load: GroupLoad) -> int:
    """Blocks in which an online request may start; 0 in a group for batch requests only."""
    return 0 if load.for_batch else load.start_blocks


def has_room(load: GroupLoad, prompt_tokens: int, max_tokens: int, room: RoomFunction) -> bool:
    """Filter: the request can start now in the blocks that `room` counts."""
    tokens_max = prompt_tokens + max_tokens
    return room(load) >= admission_blocks(prompt_tokens, tokens_max, load.group.block_size)


def kv_share(load: GroupLoad) -> Score:
    """Score: share of KV in use, awaited or reserved; then sequences per block.

    Preemptible batch sequences count last. If batch work is preemptible, the share that is awaited
    or reserved comes first: beside batch work online requests decode for so long that KV in use
    says little about the prefill backlog that a new request meets.

    Shares rather than counts: a merged group holds several times as much KV as each of its members
    did, so counts would fill small groups completely beside a half-empty large one.
    """
    capacity = max(1, load.capacity_blocks)
    online, every = load.online_sequences / capacity, load.sequences / capacity
    return (load.awaited_blocks / capacity, 1 - load.room_blocks / capacity, online, every)


def least_loaded(load: GroupLoad) -> Score:
    """Score: fewest sequences, whatever the group's size; then the share of KV in use.

    Preemptible batch sequences count last.
    """
    used = 1 - load.room_blocks / max(1, load.capacity_blocks)
    return (float(load.online_sequences), used, float(load.sequences))


SCORES: dict[str, ScoreFunction] = {"kv_share": kv_share, "least_loaded": least_loaded}
PREFIX = "prefix"
_SCORES_OF = {**SCORES, PREFIX: kv_share}
DISPATCHES = tuple(_SCORES_OF)


def score_of(dispatch: str) -> ScoreFunction:
    """The score with which a dispatch of `DISPATCHES` ranks groups, before prefix matching.

    Raises:
        ValueError: if there is no such dispatch.
    """
    if dispatch not in _SCORES_OF:
        raise ValueError(f"no dispatch {dispatch!r}; there are {', '.join(DISPATCHES)}")
    return _SCORES_OF[dispatch]
