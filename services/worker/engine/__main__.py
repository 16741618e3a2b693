"""The engine process of a worker: `python -m services.worker.engine --socket ADDRESS`.

Started by the servicer process, which writes the configuration to its standard input, and ended
with it. It handles no signals: draining is the servicer's task.
"""

from services.common.collector import lasting


def main() -> None:
    """Load the model, tell the servicer, serve."""
    with lasting():
        # Within, since most of what lasts comes from imports: torch alone makes 300,000 objects.
        from services.worker.engine.process import started

        loop = started()
    loop.run()


if __name__ == "__main__":
    main()
