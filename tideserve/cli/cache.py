"""The cache folder: files that tideserve can make again, such as converted models.

Standard library only: the set-up imports this before anything is installed.
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
    "# Made by tideserve; everything here can be deleted and is made again.\n"
)


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """`TIDESERVE_CACHE`, else `tideserve` below the user's cache folder; not created here."""
    if chosen := environ.get("TIDESERVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).absolute() / "tideserve"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()).absolute() / ".cache" / "tideserve"


def create_cache(root: Path) -> None:
    """Create `root` with the tag that tells backup tools, and `make clean`, what it is.

    A folder that already held something is left untagged: deleting it is not ours to offer.
    """
    root.mkdir(parents=True, exist_ok=True)
    if not any(root.iterdir()):
        (root / TAG_NAME).write_text(TAG_TEXT)


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
