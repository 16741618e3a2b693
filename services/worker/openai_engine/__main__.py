"""Engine process of a worker in front of a server with OpenAI's API that runs already.

`python -m services.worker.openai_engine --socket ADDRESS`; the servicer process of the worker
starts it.
"""

from services.worker.openai_engine.opening import open_upstream
from services.worker.vllm_engine.process import run_engine


def main() -> None:
    """Connect to the server, report it to the servicer, and serve requests."""
    run_engine("tideserve-openai-engine", open_upstream)


if __name__ == "__main__":
    main()
