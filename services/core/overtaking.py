"""Choice of the next request of a waiting queue, for the scheduler and the workers' planners.

The first request in queue order that fits starts. So a request that needs more KV blocks than are
free does not block shorter ones behind it. A later request that starts *overtakes* it; after
`overtaken_max` times the request blocks the queue until it fits, so it cannot starve. If requests
start in different groups, a request blocks only the groups that it could use.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol, TypeVar

from services.core.setting import number

SCAN_MAX = 16
"""Number of requests at the head of a queue that are checked."""
OVERTAKEN_MAX = 8
"""Default bound on how often a request may be overtaken; 0 keeps the queue order."""


def overtaken_setting() -> Any:
    """The setting that bounds overtaking in a waiting queue."""
    return number(
        OVERTAKEN_MAX,
        "How often later requests that fit may overtake a waiting request that does not; 0: never.",
        minimum=0,
        maximum=2**20,
        expert=True,
    )


class Overtakeable(Protocol):
    """A waiting request; `overtaken` counts the later requests that started before it."""

    overtaken: int


Waiter = TypeVar("Waiter", bound=Overtakeable)


def _always(_waiter: Overtakeable) -> bool:
    return True


def next_to_start(
    queue: Iterable[Waiter],
    fits: Callable[[Waiter], bool],
    overtaken_max: int,
    blocks_all: Callable[[Waiter], bool] = _always,
) -> Waiter | None:
    """The first request of `queue` that may start; None if none may. O(`SCAN_MAX`).

    `blocks_all` is called for each request at the overtaking bound, and returns whether it blocks
    every group; if not, `fits` must treat the groups that it could use as full from then on. Call
    `count_overtaken` when the request starts.
    """
    for waiter in islice(queue, SCAN_MAX):
        if fits(waiter):
            return waiter
        # Starvation bound: a request that was overtaken too often blocks all requests behind it.
        if waiter.overtaken >= overtaken_max and blocks_all(waiter):
            return None
    return None


def count_overtaken(
    queue: Iterable[Waiter], started: Waiter, competes: Callable[[Waiter], bool] = _always
) -> None:
    """Count that `started` overtakes each request before it in `queue` that `competes`."""
    for waiter in queue:
        if waiter is started:
            return
        waiter.overtaken += competes(waiter)
