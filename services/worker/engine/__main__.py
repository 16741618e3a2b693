"""The engine process of a worker: `python -m services.worker.engine --socket ADDRESS`.

The servicer process starts it, writes the configuration to its standard input, and takes it down
when it exits. The engine ignores SIGINT and SIGTERM: the servicer drains it.
"""

from services.common.garbage_collection import freeze_after


def main() -> None:
    """Load the model, report it to the servicer, serve."""
    with freeze_after():
        # Import inside the block: most long-lived objects come from imports (torch alone makes
        # 300,000), and the garbage collector should not scan them.
        from services.worker.engine.process import build_engine

        loop = build_engine()
    loop.run()


if __name__ == "__main__":
    main()
