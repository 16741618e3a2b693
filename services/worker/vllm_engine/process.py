"""The engine process of a worker whose model vLLM or an upstream server runs.

The servicer process of the worker starts it and writes the configuration to its standard input. The
engine process ends with the servicer.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop
import zmq
import zmq.asyncio

from services.common import config as config_module
from services.common.lifecycle import EXIT_UNUSABLE, die_with_parent
from services.common.logging import set_up_logging
from services.worker.config import WorkerConfig
from services.worker.errors import WorkerError
from services.worker.ipc import EngineUnusable, encode
from services.worker.vllm_engine.adapter import OpenedEngine, VllmAdapter

EXIT_DEAD = 1
SEND_TIMEOUT_MS = 10_000

OpenEngine = Callable[[WorkerConfig], Awaitable[OpenedEngine]]

log = logging.getLogger(__name__)


def run_engine(name: str, open_engine: OpenEngine) -> None:
    """Open the engine, report it to the servicer, and serve requests; `name` is the program's."""
    parser = argparse.ArgumentParser(prog=name)
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
    uvloop.run(serve(config, arguments.socket, open_engine))


async def serve(config: WorkerConfig, address: str, open_engine: OpenEngine) -> None:
    """Open the engine, and serve the frames of the servicer at `address`; exit if it dies."""
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, SEND_TIMEOUT_MS)
    socket.connect(address)
    try:
        opened = await open_engine(config)
    except WorkerError as error:
        await socket.send(encode(EngineUnusable(str(error))))
        socket.close()
        context.term()
        os._exit(EXIT_UNUSABLE)
    await socket.send(encode(opened.facts))
    try:
        await VllmAdapter(config.worker_id, config.planner, opened, socket).run()
    except* opened.dead as group:
        log.error("%s has died: %s", opened.name, group.exceptions[0])
        # Exit immediately: the engine is dead, so an orderly shutdown could hang.
        os._exit(EXIT_DEAD)
