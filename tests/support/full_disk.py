"""A small file system for a cluster's folder, which a test fills."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# etcd reserves two segments of 64 MB for its log.
SIZE = "320m"


class SmallDisk:
    """An in-memory file system mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Use up all space."""
        with self._filler.open("wb", buffering=0) as file:
            for size_bytes in (2**20, 2**12, 1):
                with suppress(OSError):
                    while file.write(bytes(size_bytes)) == size_bytes:
                        continue

    def free(self) -> None:
        """Free the space."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount a small file system at `folder`; skips the test where this is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a file system, which needs root and CAP_SYS_ADMIN: {error}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
