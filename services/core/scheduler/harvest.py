"""How much batch work a group gets: idle time is filled, and the rest stays in the queue.

What is bound to a group late can go to any group. So a group gets no batch request while an online
one waits there, nor before what waits there to be prefilled is less than two iterations compute.
The queue of the model is the other half of the rule: while an online request waits in it, no batch
request starts in a group that could hold that one (`SchedulerState`). Online requests that wait at
other groups do not count: in a large cluster one waits somewhere at any time. That batch work takes
what online work leaves is ConServe §4.2; there a single engine decides.
"""

from services.core.scheduler.dispatch import Score
from services.core.scheduler.group_load import GroupLoad

ITERATIONS_AHEAD = 2
"""Iterations for which a group has prompt tokens of batch requests before it needs more."""


def harvest_blocks(load: GroupLoad) -> int:
    """KV blocks in which a batch request may start; 0 or less if the group needs no batch work."""
    ahead = ITERATIONS_AHEAD * load.group.max_batch_tokens
    if load.for_batch is False or load.online_waiting or load.prefill_tokens >= ahead:
        return 0
    return load.batch_start_blocks


def most_idle(load: GroupLoad) -> Score:
    """Score of a batch request: fewest online sequences, then most free blocks."""
    return (float(load.online_sequences), -float(load.batch_start_blocks))
