"""Choice of the next request of a waiting queue: the oldest that fits, with bounded overtaking.

The scheduler and the workers use the same rule. It avoids head-of-line blocking by a request that
needs more KV blocks than are free, since most requests behind it are short. Each request that
starts earlier overtakes it; after `overtaken_max` times the request blocks the queue until it fits,
so it cannot starve. If a queue has several targets (groups), a request blocks only those that it
could use.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol, TypeVar

from services.core.setting import number

SCAN_MAX = 16
"""Number of requests at the head of a queue that are checked for a fit."""
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
    """A waiting request that counts how many later requests have started before it."""

    overtaken: int


Waiter = TypeVar("Waiter", bound=Overtakeable)


def _holds_all(_waiter: Overtakeable) -> bool:
    return True


def next_to_start(
    line: Iterable[Waiter],
    fits: Callable[[Waiter], bool],
    overtaken_max: int,
    holds_all: Callable[[Waiter], bool] = _holds_all,
) -> Waiter | None:
    """The oldest request of `line` that may start now; None if no request may. O(`SCAN_MAX`).

    `holds_all` is called for each request that blocks the queue, and returns whether it blocks
    every target; if not, `fits` must exclude the blocked targets from then on. Call `start` when a
    request starts.
    """
    for waiter in islice(line, SCAN_MAX):
        if fits(waiter):
            return waiter
        # Starvation bound: a request that was overtaken too often blocks all requests behind it.
        if waiter.overtaken >= overtaken_max and holds_all(waiter):
            return None
    return None


def start(
    line: Iterable[Waiter], started: Waiter, wants: Callable[[Waiter], bool] = _holds_all
) -> None:
    """Count that `started` overtakes all earlier requests of `line` that want the same target."""
    for waiter in line:
        if waiter is started:
            return
        waiter.overtaken += wants(waiter)
