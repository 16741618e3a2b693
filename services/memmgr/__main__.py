"""`python -m services.memmgr [--config FILE]`, or `tideserve-memmgr`."""

from services.common import lifecycle
from services.memmgr.app import serve
from services.memmgr.config import Config


def main() -> None:
    """Serve until SIGTERM."""
    lifecycle.main("memmgr", Config, serve)


if __name__ == "__main__":
    main()
