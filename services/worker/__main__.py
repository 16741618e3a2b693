"""`python -m services.worker [--config FILE]`, or `tideserve-worker`: the servicer."""

from services.common import lifecycle
from services.worker.app import serve
from services.worker.config import WorkerConfig


def main() -> None:
    """Serve until SIGTERM."""
    lifecycle.main("worker", WorkerConfig, serve)


if __name__ == "__main__":
    main()
