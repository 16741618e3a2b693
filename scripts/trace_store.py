"""A trace store that is nobody's here, Arize Phoenix, in an environment of its own in the cache.

`python scripts/trace_store.py` fetches it unless it is there, about 1 GiB and two minutes. Nothing
of the project imports it: tests/integration/test_trace_store.py sends traces there and fetches
them back.
"""

import shutil
import sys
import venv
from pathlib import Path

from benchmarks.systems.client_environment import install
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.errors import SystemUnavailable

PACKAGE = "arize-phoenix==20.26.0"
EXIT_MISSING = 77


def folder() -> Path:
    """Where the environment is, or would be."""
    return cache_root() / "trace-store" / PACKAGE.partition("==")[2]


def program() -> Path | None:
    """The store's command, None while it is not installed."""
    path = folder() / "bin" / "phoenix"
    return path if path.is_file() else None


def fetch() -> str:
    """Install the store; "" or one sentence that says why it could not be."""
    create_cache(cache_root())
    shutil.rmtree(folder(), ignore_errors=True)
    venv.create(folder(), with_pip=True)
    try:
        install(folder() / "bin" / "python", [PACKAGE], PACKAGE)
    except SystemUnavailable as error:
        shutil.rmtree(folder())
        return str(error)
    return ""


def main() -> int:
    """0 if the store is there in the end, else 77."""
    reason = "" if program() is not None else fetch()
    if reason:
        print(reason, file=sys.stderr)
        return EXIT_MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
