"""Where Python keeps what it has compiled of the modules that it imports.

An engine imports several thousand modules. Compiling them takes longer than all else that it does
to start, so it is done once.
"""

import os
import sys
import sysconfig

from tideserve.cli.cache import cache_root

FOLDER = "bytecode"  # below the cache folder
NOT_WRITTEN = "PYTHONDONTWRITEBYTECODE"
PREFIX = "PYTHONPYCACHEPREFIX"


def keep_bytecode(packages: str = sysconfig.get_path("purelib")) -> None:
    """From here on this process, and those that it starts, keep bytecode in the cache folder.

    No effect if Python writes it beside the sources, as into the folder of installed packages.
    """
    if not sys.dont_write_bytecode and os.access(packages, os.W_OK):
        return
    os.environ.pop(NOT_WRITTEN, None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault(PREFIX, str(cache_root() / FOLDER))
