"""Engine process of a worker that runs vLLM: `PYTHON -P THIS_FILE --socket ADDRESS`.

The servicer process of the worker starts it in vLLM's own virtual environment. tideserve's packages
are last on `sys.path`, so that none of them shadows a package of vLLM.

vLLM computes in child processes. Each of them imports this file as `__mp_main__` and ends with its
parent, so a killed engine leaves no process behind.
"""

import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from services.common.lifecycle import die_with_parent

if __name__ == "__mp_main__":
    die_with_parent()

from services.worker.config import WorkerConfig
from services.worker.errors import WorkerError
from services.worker.vllm_engine.adapter import OpenedEngine
from services.worker.vllm_engine.process import run_engine


async def open_vllm(config: WorkerConfig) -> OpenedEngine:
    """Load the model with vLLM; raises WorkerError if vLLM cannot serve it."""
    try:
        from services.worker.vllm_engine.async_llm import open_engine
    except ImportError as error:
        raise WorkerError(
            f"the installed vLLM cannot be used: {error}; run `tideserve engine install vllm`"
        ) from error
    return open_engine(config)


def main() -> None:
    """Load the model, report it to the servicer, and serve requests."""
    run_engine("tideserve-vllm-engine", open_vllm)


if __name__ == "__main__":
    main()
