"""The cache folder: files that tideserve can recreate, such as converted models.

Uses the standard library only, because set-up imports this module before it installs packages.
"""

import os
import stat
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

PROFILES = "profiles"  # folder of measured device profiles below the root
TAG_NAME = "CACHEDIR.TAG"
TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Created by tideserve, which recreates everything here if it is deleted.\n"
)


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """`TIDESERVE_CACHE`, else `tideserve` in the user's cache folder; does not create it."""
    if chosen := environ.get("TIDESERVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).absolute() / "tideserve"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()).absolute() / ".cache" / "tideserve"


def create_cache(root: Path) -> None:
    """Create `root` with the tag that marks a cache for backup tools and `make clean`.

    A folder that has other files is not tagged, so that `make clean` never deletes them.
    """
    root.mkdir(parents=True, exist_ok=True)
    if not any(root.iterdir()):
        (root / TAG_NAME).write_text(TAG_TEXT)


FOLDER = "bytecode"  # below the cache folder
LARGEST = "torch"
NOT_WRITTEN = "PYTHONDONTWRITEBYTECODE"
PREFIX = "PYTHONPYCACHEPREFIX"


def keep_bytecode(package: str = LARGEST) -> None:
    """Have this process and its children store bytecode in the cache folder.

    No effect if the bytecode of `package` exists, Python can write it beside the sources, or the
    cache folder is not writable.
    """
    if _has_bytecode(package):
        return
    folder = os.environ.get(PREFIX) or _own_folder()
    if folder is None:
        return
    os.environ.pop(NOT_WRITTEN, None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ[PREFIX] = folder


def _has_bytecode(package: str) -> bool:
    """Whether the bytecode of `package` exists or will be written beside the sources."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return True
    chosen = sys.pycache_prefix or os.path.dirname(spec.origin)
    return not sys.dont_write_bytecode and os.access(chosen, os.W_OK)


def _own_folder() -> str | None:
    """The bytecode folder, if only this user can write it, because bytecode is executed."""
    try:
        root = cache_root()
        create_cache(root)
        folder = root / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder) if _is_ours(folder) else None
    except (OSError, RuntimeError):  # no home folder, or not writable
        return None


def _is_ours(folder: Path) -> bool:
    info = folder.stat()
    others = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return info.st_uid == os.geteuid() and not others and os.access(folder, os.W_OK)
