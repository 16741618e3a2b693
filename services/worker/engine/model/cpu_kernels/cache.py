"""The folder for the machine code of the kernels."""

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "TIDESERVE_KERNEL_CACHE"
# Independent of the umask. Files that numba makes inside get its mode.
_PRIVATE = 0o700
log = logging.getLogger(__name__)


def cache_folder(sources: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for the machine code of the kernels in the folder `sources`.

    It lies beside the sources, or in the folder that `TIDESERVE_KERNEL_CACHE` names. The latter
    starts as a copy of the former, because an image contains compiled kernels but is read-only. The
    code is for the CPUs that compiled it; another CPU ignores it and adds its own.

    The code is executed. So a folder that other users may have written to is not used: the function
    warns, and returns the folder beside the sources.

    A kernel contains the functions that it calls from other files, and numba does not notice when
    these change. So every state of the sources has a folder of its own.
    """
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    own = sources / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}"
    chosen = environment.get(CACHE_VARIABLE)
    if not chosen:
        return own
    folder = Path(chosen).expanduser().absolute() / own.name
    begin_with(own, folder)
    for one in (folder.parent, folder):
        reason = why_not_trusted(one)
        if reason is not None:
            log.warning(
                "the cache of kernels at %s is not used: %s; give %s a folder of this user that"
                " nobody else may write to",
                *(one, reason, CACHE_VARIABLE),
            )
            return own
    return folder


def why_not_trusted(folder: Path) -> str | None:
    """Which other user may have written to the folder; None if none, or if there is no folder."""
    try:
        seen = folder.stat()
    except OSError:
        return None
    if seen.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {seen.st_uid}"
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(seen.st_mode):o} lets others write"
    return None


def begin_with(seed: Path, folder: Path) -> None:
    """Make `folder` with what is in `seed`, if anything, for this user alone, unless it exists.

    Other processes see all of it or nothing.
    """
    try:
        if folder.exists():
            return
        folder.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as temporary:
            copied = Path(temporary) / "kernels"
            if seed.is_dir():
                shutil.copytree(seed, copied)
            else:
                copied.mkdir()
            copied.chmod(_PRIVATE)
            copied.rename(folder)
    except OSError as error:
        # Another process was first, or the folder may not be written to: kernels are then compiled.
        if not os.path.isdir(folder):  # Path.is_dir raises where it may not look.
            log.info("the cache of kernels begins empty: %s", error)
