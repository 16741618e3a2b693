"""Where Python keeps what it has compiled of the modules that it imports.

An engine imports several thousand modules. Compiling them takes longer than all else that it does
to start, so it is done once.
"""

import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

from tideserve.cli.cache import cache_root, create_cache

FOLDER = "bytecode"  # below the cache folder
LARGEST = "torch"
NOT_WRITTEN = "PYTHONDONTWRITEBYTECODE"
PREFIX = "PYTHONPYCACHEPREFIX"


def keep_bytecode(package: str = LARGEST) -> None:
    """From here on this process, and those that it starts, keep bytecode in the cache folder.

    No effect if the bytecode of `package` is there already, or Python writes it beside the sources,
    or nothing can be kept in the cache folder.
    """
    if _is_kept(package):
        return
    folder = os.environ.get(PREFIX) or _own_folder()
    if folder is None:
        return
    os.environ.pop(NOT_WRITTEN, None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ[PREFIX] = folder


def _is_kept(package: str) -> bool:
    """Whether its bytecode is where Python looks for it, or will be there once it is imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return True
    chosen = sys.pycache_prefix or os.path.dirname(spec.origin)
    return not sys.dont_write_bytecode and os.access(chosen, os.W_OK)


def _own_folder() -> str | None:
    """The folder in the cache, which nobody else can write: what is in it is executed."""
    try:
        root = cache_root()
        create_cache(root)
        folder = root / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder) if _is_ours(folder) else None
    except (OSError, RuntimeError):  # no home folder, or one that may not be written
        return None


def _is_ours(folder: Path) -> bool:
    seen = folder.stat()
    others = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return seen.st_uid == os.geteuid() and not others and os.access(folder, os.W_OK)
