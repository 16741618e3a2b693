"""Engine process of a worker that runs vLLM: `PYTHON -P THIS_FILE --socket ADDRESS`.

The servicer process of the worker starts it in vLLM's own virtual environment and writes the
configuration to its standard input. The engine process ends with the servicer. tideserve's packages
are last on `sys.path`, so that none of them shadows a package of vLLM.

vLLM computes in child processes. Each of them imports this file as `__mp_main__` and ends with its
parent, so a killed engine leaves no process behind.
"""

import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from services.common.lifecycle import EXIT_UNUSABLE, die_with_parent

if __name__ == "__mp_main__":
    die_with_parent()

import argparse
import logging
import os
import signal

import uvloop
import zmq
import zmq.asyncio

from services.common import config as config_module
from services.common.logging import set_up_logging
from services.worker.config import WorkerConfig
from services.worker.errors import WorkerError
from services.worker.ipc import EngineUnusable, encode
from services.worker.vllm_engine.adapter import OpenedEngine, VllmAdapter

EXIT_DEAD = 1
SEND_TIMEOUT_MS = 10_000

log = logging.getLogger(__name__)


def main() -> None:
    """Load the model, report it to the servicer, and serve requests."""
    parser = argparse.ArgumentParser(prog="tideserve-vllm-engine")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--incarnation", required=True)
    arguments = parser.parse_args()
    die_with_parent()
    if os.getppid() != arguments.parent:
        sys.exit(EXIT_UNUSABLE)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    data = config_module.parse_yaml(sys.stdin.read(), "the servicer's configuration")
    config = config_module.from_mapping(WorkerConfig, data, "the servicer's configuration")
    set_up_logging(config.log_level, config.log_format)
    uvloop.run(serve(config, arguments.socket))


async def serve(config: WorkerConfig, address: str) -> None:
    """Open vLLM, and serve the frames of the servicer at `address`; exit if vLLM dies."""
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, SEND_TIMEOUT_MS)
    socket.connect(address)
    try:
        opened = opened_engine(config)
    except WorkerError as error:
        await socket.send(encode(EngineUnusable(str(error))))
        socket.close()
        context.term()
        os._exit(EXIT_UNUSABLE)
    await socket.send(encode(opened.facts))
    try:
        await VllmAdapter(config.worker_id, config.planner, opened, socket).run()
    except* opened.dead as group:
        log.error("vLLM's engine has died: %s", group.exceptions[0])
        # Exit immediately: vLLM is dead, so an orderly shutdown could hang.
        os._exit(EXIT_DEAD)


def opened_engine(config: WorkerConfig) -> OpenedEngine:
    """Open vLLM. Raises WorkerError if it cannot be used."""
    try:
        from services.worker.vllm_engine.async_llm import open_engine
    except ImportError as error:
        raise WorkerError(
            f"the installed vLLM cannot be used: {error}; run `tideserve engine install vllm`"
        ) from error
    return open_engine(config)


if __name__ == "__main__":
    main()
