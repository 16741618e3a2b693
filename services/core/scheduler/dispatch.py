"""Filters and scores with which the scheduler chooses a worker group for a request.

A filter decides whether a group can take the request; a score ranks groups, lower is better. A
score depends on the group's load alone, never on time or the request, so that `GroupIndex` can keep
groups sorted by score. The setting `dispatch` names a score of `SCORES`, or `PREFIX`, with which
`PrefixRanking` chooses by predicted TTFT and `kv_share` breaks ties. Online requests are those of
all classes except batch.
"""

from collections.abc import Callable

from services.core.request import admission_blocks
from services.core.scheduler.group_load import GroupLoad

NO_ADDRESSES: frozenset[str] = frozenset()

Score = tuple[float, ...]
ScoreFunction = Callable[[GroupLoad], Score]
RoomFunction = Callable[[GroupLoad], int]


def serves(load: GroupLoad, now_s: float) -> bool:
    """Filter: the group's load report is fresh, and no request runs there exclusively."""
    return load.is_fresh(now_s) and not load.is_exclusive(now_s)


def could_hold(load: GroupLoad, prompt_tokens: int, max_tokens: int) -> bool:
    """Filter: the whole sequence fits into the group's KV cache if it runs there alone."""
    return prompt_tokens + max_tokens <= load.tokens_max


def start_blocks(load: GroupLoad) -> int:
    """KV blocks in which an online request may start; 0 if the group takes only batch requests."""
    return 0 if load.for_batch else load.start_blocks


def has_room(load: GroupLoad, prompt_tokens: int, max_tokens: int, room: RoomFunction) -> bool:
    """Filter: `room(load)` is enough blocks for the request to start now."""
    tokens_max = prompt_tokens + max_tokens
    return room(load) >= admission_blocks(prompt_tokens, tokens_max, load.group.block_size)


def kv_share(load: GroupLoad) -> Score:
    """Score: share of KV blocks in use, awaited or reserved; then sequences per block.

    Preemptible batch sequences only break ties. If batch requests are preemptible, the share that
    online requests await or have reserved ranks first: online requests decode long beside batch
    requests, so the KV in use says little about the prefill backlog that a new request meets.

    The score uses shares because a merged group has several times the KV of a single worker:
    with absolute numbers, small groups would fill up while a large group is half empty.
    """
    capacity = max(1, load.capacity_blocks)
    online, every = load.online_sequences / capacity, load.sequences / capacity
    return (load.awaited_blocks / capacity, 1 - load.room_blocks / capacity, online, every)


def least_loaded(load: GroupLoad) -> Score:
    """Score: number of sequences, regardless of the group's size; then the share of KV in use.

    Preemptible batch sequences only break ties.
    """
    used = 1 - load.room_blocks / max(1, load.capacity_blocks)
    return (float(load.online_sequences), used, float(load.sequences))


SCORES: dict[str, ScoreFunction] = {"kv_share": kv_share, "least_loaded": least_loaded}
PREFIX = "prefix"
_SCORES_OF = {**SCORES, PREFIX: kv_share}
DISPATCHES = tuple(_SCORES_OF)


def score_of(dispatch: str) -> ScoreFunction:
    """The score of a dispatch of `DISPATCHES`; for `PREFIX`, the score that breaks ties.

    Raises:
        ValueError: if there is no such dispatch.
    """
    if dispatch not in _SCORES_OF:
        raise ValueError(f"no dispatch {dispatch!r}; there are {', '.join(DISPATCHES)}")
    return _SCORES_OF[dispatch]
