"""The cache folder: files that tideserve can make again, such as converted models.

Standard library only: the set-up imports this before anything is installed.
"""

import os
from collections.abc import Mapping
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
