"""Resource exhaustion by process limits: file descriptors and file sizes."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OWN = 0
"""Process id of the calling process, for prlimit."""


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Prevent opening descriptors in this block; open descriptors keep working."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with _limited(OWN, resource.RLIMIT_NOFILE, lowest_free):
        yield


@contextmanager
def no_room_for_files(size_max: int = 0, pid: int = OWN) -> Iterator[None]:
    """Limit files of the process to `size_max`: larger writes are short or fail with EFBIG.

    Resembles a full disk without a mounted file system, which needs root. Processes started in this
    block inherit the limit.
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
        # The process may have exited in the block.
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (before, hard))
