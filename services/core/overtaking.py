"""Which request of a waiting line starts next: the oldest that fits, within a bound.

One rule for every line, the scheduler's and a worker's. A request that needs more room
than there is would otherwise hold up all requests behind it, most of which are short. Each request
that starts before it overtakes it; a request that has been overtaken often enough holds the line
until it fits. Where a line has several places to start, a request holds only those that it could
use.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol, TypeVar

from services.core.setting import number

SCAN_MAX = 16
"""Requests at the head of a line among which one that fits is looked for."""
OVERTAKEN_MAX = 8
"""How often a request may be overtaken by default; 0 keeps the order of the line."""


def overtaken_setting() -> Any:
    """The bound, in the configuration of a waiting line."""
    return number(
        OVERTAKEN_MAX,
        "How often a waiting request may be overtaken by later ones that fit where it does not;"
        " 0: never.",
        minimum=0,
        maximum=2**20,
        expert=True,
    )


class Overtakeable(Protocol):
    """A waiting request that counts the requests behind it that have started before it."""

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
    """The request of `line`, oldest first, that may start now; None if there is none.

    `holds_all` hears of each that holds the line, and tells whether it holds every place; if not,
    `fits` has to leave its places out from then on. Call `start` when one starts. O(`SCAN_MAX`).
    """
    for waiter in islice(line, SCAN_MAX):
        if fits(waiter):
            return waiter
        if waiter.overtaken >= overtaken_max and holds_all(waiter):
            return None
    return None


def start(
    line: Iterable[Waiter], started: Waiter, wants: Callable[[Waiter], bool] = _holds_all
) -> None:
    """Count that `started`, which is in `line`, overtakes all before it that want its place."""
    for waiter in line:
        if waiter is started:
            return
        waiter.overtaken += wants(waiter)
