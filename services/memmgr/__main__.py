"""Runs the memory manager: `python -m services.memmgr [--config FILE]`, or `tideserve-memmgr`."""

from services.common import lifecycle
from services.memmgr.app import serve
from services.memmgr.config import MemmgrConfig


def main() -> None:
    """Serve until SIGTERM."""
    lifecycle.main("memmgr", MemmgrConfig, serve)


if __name__ == "__main__":
    main()
