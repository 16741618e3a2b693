"""Where the machine code of the kernels is kept between processes."""

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "TIDESERVE_KERNEL_CACHE"
# Whatever the umask: what numba makes inside has its mode.
_PRIVATE = 0o700
log = logging.getLogger(__name__)


def cache_folder(sources: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the machine code of the kernels in the folder `sources` is kept.

    Beside the sources, or in the folder that `TIDESERVE_KERNEL_CACHE` names, which begins with what
    is beside the sources: an image has them compiled already, but cannot be written to. The code in
    it is for the processors that compiled it; another one takes none of it and adds its own.

    What is in the folder is executed. One that others may have written to is left alone, with a
    warning, and what is beside the sources is all there is.

    A kernel contains what it calls from other files, which numba does not look at: so every state
    of the sources has a folder of its own.
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
