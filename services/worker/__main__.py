"""`python -m services.worker [--config FILE]`, or `tideserve-worker`: the servicer."""

from services.common.allocator import limit_arenas
from services.common.garbage_collection import freeze_after


def main() -> None:
    """Serve until SIGTERM."""
    limit_arenas()
    with freeze_after():
        # Import inside the block: with the objects of imports, collections would be rare, and the
        # garbage of gRPC calls would grow to megabytes.
        from services.common import lifecycle
        from services.worker.app import serve
        from services.worker.config import WorkerConfig
    lifecycle.main("worker", WorkerConfig, serve)


if __name__ == "__main__":
    main()
