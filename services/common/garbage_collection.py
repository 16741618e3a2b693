"""Pauses Python's cyclic garbage collector, for latency-critical code and for start-up."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection; the body should be short and create no cycles.

    With the objects of a large cluster, a collection takes longer than the code that it interrupts.
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
    """Pause collection, then exempt all existing objects from later collections.

    The body should create objects that live as long as the process, such as by imports.
    """
    with gc_paused():
        yield
        gc.freeze()
