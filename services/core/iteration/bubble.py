"""How much of the time of a pipeline's stages is lost to waiting."""

from collections.abc import Sequence as Row

Interval = tuple[float, float]
"""Start and end in seconds."""


def bubble_share(stages: Row[Row[Interval]]) -> float:
    """Idle time of the stages over their time while a microbatch is anywhere between them.

    `stages[s][k]` is when stage s ran microbatch k. A microbatch is in the pipeline from its start
    at the first stage to its end at the last; time without any is nobody's bubble. 0 without any.
    """
    occupied_s, until_s = 0.0, float("-inf")
    for (start_s, _), (_, end_s) in zip(stages[0], stages[-1], strict=True):
        occupied_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
    return 1.0 - busy_s / (len(stages) * occupied_s) if occupied_s else 0.0
