"""Lets a process run out of what a limit bounds: descriptors, or room for files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OWN = 0
"""Process id of the calling process, for prlimit."""


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """No descriptor can be opened in this block; those that are open keep working."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with _limited(OWN, resource.RLIMIT_NOFILE, lowest_free):
        yield


@contextmanager
def no_room_for_files(size_max: int = 0, pid: int = OWN) -> Iterator[None]:
    """No file of the process can exceed `size_max`: a write is short or fails with EFBIG.

    Like a full disk, but without a file system of its own, which needs root. Processes that it
    starts in this block inherit the limit.
    """
    with _limited(pid, resource.RLIMIT_FSIZE, size_max):
        yield


@contextmanager
def _limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    before, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, hard))
    try:
        yield
    finally:
        # The process may have ended in the block.
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (before, hard))
