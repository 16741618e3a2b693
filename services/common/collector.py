"""The cycle collector, kept away from work that must not be held up by it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cycle collection during the body, which should be short and make no cycles.

    A pass over the objects of a large cluster takes longer than a plan for it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def lasting() -> Iterator[None]:
    """The body makes what lasts as long as the process, such as what it imports.

    No cycle collection during the body, nor does a later one look at what there is at its end.
    """
    with collector_paused():
        yield
        gc.freeze()
