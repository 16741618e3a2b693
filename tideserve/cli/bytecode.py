"""Where Python keeps what it has compiled of the modules that it imports.

An engine imports several thousand modules. Compiling them takes longer than all else that it does
to start, so it is done once.
"""

import os
from collections.abc import Mapping

from tideserve.cli.cache import cache_root

FOLDER = "bytecode"  # below the cache folder
NOT_WRITTEN = "PYTHONDONTWRITEBYTECODE"
PREFIX = "PYTHONPYCACHEPREFIX"


def with_bytecode(environment: Mapping[str, str], cached: str | None) -> dict[str, str]:
    """The environment for a Python that keeps bytecode.

    `cached`: where the bytecode of a module is that this process has imported. If it is not there,
    Python was told to write none beside the sources, or may not. Then it goes to the cache folder.
    """
    if cached is None or os.path.exists(cached):
        return dict(environment)
    kept = {key: value for key, value in environment.items() if key != NOT_WRITTEN}
    return {PREFIX: str(cache_root(environment) / FOLDER), **kept}
