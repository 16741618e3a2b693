"""The engine process of a worker: `python -m services.worker.engine --socket ADDRESS`.

The servicer process (the worker's gRPC server) starts it and writes the configuration to its
standard input. The engine exits with the servicer. It ignores SIGINT and SIGTERM, because the
servicer lets running requests finish first.
"""

from services.common.garbage_collection import freeze_after


def main() -> None:
    """Load the model, report its sizes to the servicer, and serve until the process ends."""
    with freeze_after():
        # Import inside the block: most long-lived objects come from imports (torch alone makes
        # 300,000), and the garbage collector should not scan them.
        from services.worker.engine.process import build_engine

        loop = build_engine()
    loop.run()


if __name__ == "__main__":
    main()
