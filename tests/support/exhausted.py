"""Lets this process run out of what a limit bounds: descriptors, or room for files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """No descriptor can be opened in this block; those that are open keep working."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with _limited(resource.RLIMIT_NOFILE, lowest_free):
        yield


@contextmanager
def no_room_for_files() -> Iterator[None]:
    """No file can grow in this block: a write fails with EFBIG, as with ENOSPC on a full disk."""
    with _limited(resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def _limited(kind: int, soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))
