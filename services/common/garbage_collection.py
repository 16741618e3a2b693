"""Keeps Python's cyclic garbage collector away from latency-critical work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection; the body should be short and create no cycles.

    A collection over the objects of a large cluster takes longer than planning for it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def freeze_after() -> Iterator[None]:
    """For code that creates objects with the lifetime of the process, such as imports.

    Pauses the collector, and exempts all objects that exist at the end from later collections.
    """
    with gc_paused():
        yield
        gc.freeze()
