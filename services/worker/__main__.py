"""`python -m services.worker --config FILE`: the servicer process of a worker."""

from services.common.lifecycle import main
from services.worker.app import serve
from services.worker.config import WorkerConfig

if __name__ == "__main__":
    main("worker", WorkerConfig, serve)
