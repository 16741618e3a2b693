"""`python -m services.scheduler [--config FILE]`, also installed as `tideserve-scheduler`."""

from services.common import lifecycle
from services.scheduler.app import serve
from services.scheduler.config import SchedulerConfig


def main() -> None:
    """Serve until SIGTERM."""
    lifecycle.main("scheduler", SchedulerConfig, serve)


if __name__ == "__main__":
    main()
