"""The engine process of a worker: `python -m services.worker.engine --socket ADDRESS`.

Started by the servicer process, which writes the configuration to its standard input, and ended
with it. It takes no signal of its own: a drain is the
servicer's business.
"""

import argparse
import logging
import os
import signal
import sys

import torch

from services.common import config as config_module
from services.common.errors import ServiceError
from services.common.lifecycle import EXIT_UNUSABLE, die_with_parent, set_up_logging
from services.core.iteration.state import IterationConfig, IterationState
from services.worker.config import WorkerConfig
from services.worker.engine.loop import EngineLoop, connect, send
from services.worker.engine.runner import ModelRunner, RunnerConfig
from services.worker.errors import WorkerError
from services.worker.ipc import EngineReady, EngineUnusable

log = logging.getLogger(__name__)


def main() -> None:
    """Load the model, tell the servicer, serve."""
    parser = argparse.ArgumentParser(prog="tideserve-engine")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    if os.getppid() != arguments.parent:
        sys.exit(EXIT_UNUSABLE)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    data = config_module.parse_yaml(sys.stdin.read(), "the servicer's configuration")
    config = config_module.from_mapping(WorkerConfig, data, "the servicer's configuration")
    socket = connect(arguments.socket)
    try:
        runner = ModelRunner.load(runner_config(config))
    except (WorkerError, ServiceError) as error:
        send(socket, EngineUnusable(str(error)))
        socket.close()
        sys.exit(EXIT_UNUSABLE)
    send(socket, describe(runner, config))
    EngineLoop(planner(runner, config), runner, socket).run()


def runner_config(config: WorkerConfig) -> RunnerConfig:
    """The part of the configuration that the model runner needs."""
    return RunnerConfig(
        model_dir=config.model_dir,
        device=config.device,
        dtype=getattr(torch, config.dtype),
        budget_bytes=config.memory_bytes,
        block_size=config.block_size,
        chunk_bytes=config.chunk_bytes,
        load_format=config.load_format,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        threads=config.threads,
    )


def planner(runner: ModelRunner, config: WorkerConfig) -> IterationState:
    """The planner over the blocks that the runner has."""
    return IterationState(
        IterationConfig(
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
        )
    )


def describe(runner: ModelRunner, config: WorkerConfig) -> EngineReady:
    """What the servicer tells the cluster about this engine."""
    return EngineReady(
        max_model_len=min(runner.geometry.max_model_len, runner.num_blocks * runner.block_size),
        vocab_size=runner.geometry.vocab_size,
        block_size=runner.block_size,
        kv_blocks_total=runner.num_blocks,
        kv_block_bytes=runner.kv_bytes_per_token * runner.block_size,
        budget_bytes=config.memory_bytes,
        parameter_bytes=runner.parameter_bytes,
        staging_bytes=runner.staging_bytes,
    )


if __name__ == "__main__":
    main()
