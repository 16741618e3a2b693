"""`python -m services.scheduler --config FILE`."""

from services.common.lifecycle import main
from services.scheduler.app import serve
from services.scheduler.config import Config

if __name__ == "__main__":
    main("scheduler", Config, serve)
