"""Where the machine code of the kernels is kept between processes."""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "TIDESERVE_KERNEL_CACHE"
log = logging.getLogger(__name__)


def cache_folder(sources: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the machine code of the kernels in the folder `sources` is kept.

    Beside the sources, or in the folder that `TIDESERVE_KERNEL_CACHE` names, which begins with what
    is beside the sources: an image has them compiled already, but cannot be written to. The code in
    it is for the processors that compiled it; another one takes none of it and adds its own.

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
    return folder


def begin_with(seed: Path, folder: Path) -> None:
    """Copy `seed` to `folder` unless that exists; other processes see all of it or nothing."""
    if not seed.is_dir() or folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as temporary:
            copied = Path(temporary) / "kernels"
            shutil.copytree(seed, copied)
            copied.rename(folder)
    except OSError as error:
        # Another process was first, or the folder may not be written to: kernels are then compiled.
        if not folder.is_dir():
            log.info("the cache of kernels begins empty: %s", error)
