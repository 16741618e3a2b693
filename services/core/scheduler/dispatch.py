"""Which group takes a request: filter and score; `GroupIndex.pick` picks.

Filters and scores are small pure functions. `SCORES` has the scores by name; the scheduler's option
`dispatch` chooses one. A score depends on the load alone; what changes with time is a filter. The
dispatch `PREFIX` depends on the request, too: `PrefixRanking` picks, and `kv_share` breaks ties.
"""

from collections.abc import Callable

from services.core.request import admission_blocks
from services.core.scheduler.group_load import GroupLoad

NOBODY: frozenset[str] = frozenset()

Score = tuple[float, ...]
ScoreFunction = Callable[[GroupLoad], Score]
RoomFunction = Callable[[GroupLoad], int]


def serves(load: GroupLoad, now_s: float) -> bool:
    """Filter: the group's worker has reported lately, at this epoch, and no request is alone."""
    return load.is_fresh(now_s) and not load.is_kept(now_s)


def could_hold(load: GroupLoad, prompt_tokens: int, max_tokens: int) -> bool:
    """Filter: the request fits into the group if it is alone."""
    return prompt_tokens + max_tokens <= load.tokens_max


def start_blocks(load: GroupLoad) -> int:
    """Room of a request that does not yield; none in a group that is for batch requests only."""
    return 0 if load.for_batch else load.start_blocks


def has_room(load: GroupLoad, prompt_tokens: int, max_tokens: int, room: RoomFunction) -> bool:
    """Filter: the request can start now in the `room` of the group."""
    tokens_max = prompt_tokens + max_tokens
    return room(load) >= admission_blocks(prompt_tokens, tokens_max, load.group.block_size)


def kv_share(load: GroupLoad) -> Score:
    """Score: the smallest share of KV in use, waited for or reserved; then sequences per block.

    Batch sequences that yield count last of all. Where they do, the share that is waited for or
    reserved comes first: beside batch work online requests decode for so long that KV in use says
    little about how many prompts a new one has to wait for.

    A merged group holds several times as much as one of its members did, so counts of sequences
    would fill small groups to the brim beside a large one that is half empty.
    """
    capacity = max(1, load.capacity_blocks)
    online, every = load.online_sequences / capacity, load.sequences / capacity
    return (load.awaited_blocks / capacity, 1 - load.room_blocks / capacity, online, every)


def least_loaded(load: GroupLoad) -> Score:
    """Score: fewest sequences, whatever the group holds; then the smallest share of KV in use.

    Batch sequences that yield count last of all.
    """
    used = 1 - load.room_blocks / max(1, load.capacity_blocks)
    return (float(load.online_sequences), used, float(load.sequences))


SCORES: dict[str, ScoreFunction] = {"kv_share": kv_share, "least_loaded": least_loaded}
PREFIX = "prefix"
_SCORES_OF = {**SCORES, PREFIX: kv_share}
DISPATCHES = tuple(_SCORES_OF)


def score_of(dispatch: str) -> ScoreFunction:
    """The score by which a dispatch of `DISPATCHES` ranks groups before it looks at a request.

    Raises:
        ValueError: if there is no such dispatch.
    """
    if dispatch not in _SCORES_OF:
        raise ValueError(f"no dispatch {dispatch!r}; there are {', '.join(DISPATCHES)}")
    return _SCORES_OF[dispatch]
