"""Co-runners: processes that run each measured batch at the same time as the profiled engine.

Workers of a machine share its memory bandwidth, which limits decodes: two concurrent decodes are a
quarter slower than a decode alone. So a profile for several workers per machine is measured with
co-runners. A co-runner (`python -m services.worker.engine.profile.co_runners`) reads its
configuration as JSON from the first line of standard input, then a batch per line, and answers each
line with a line.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import IO

from services.common import config as config_module
from services.common.lifecycle import die_with_parent
from services.core.cost.model import Chunks
from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.profile.config import ProfileConfig
from services.worker.engine.profile.measurer import Measurer
from services.worker.errors import WorkerError

STOP_GRACE_S = 5.0


class CoRunnerLost(WorkerError):
    """A co-runner has terminated."""

    def __init__(self) -> None:
        super().__init__(
            "an engine that ran beside the measured engine has terminated, perhaps for lack of"
            " memory; measure with fewer engines (--workers)"
        )


class CoRunners:
    """Running co-runners that have loaded the model; `start_co_runners` creates them."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    @contextmanager
    def run(self, batch: Chunks) -> Iterator[None]:
        """A context in which all co-runners run a batch; waits for them. Raises CoRunnerLost."""
        for process in self._processes:
            _write_line(process, json.dumps(batch))
        yield
        # Wait, so that the next measurement does not overlap this batch.
        self.await_all()

    def await_all(self) -> None:
        """Wait for an answer of each co-runner. Raises CoRunnerLost."""
        for process in self._processes:
            assert process.stdout is not None
            # End of file: the process has terminated.
            if not process.stdout.readline():
                raise CoRunnerLost


@contextmanager
def start_co_runners(config: ProfileConfig) -> Iterator[CoRunners]:
    """A context with the configured number of co-runners. Raises CoRunnerLost."""
    first = json.dumps(asdict(config), default=str)
    with ExitStack() as stack:
        processes = [_start(stack) for _ in range(config.co_runners)]
        for process in processes:
            _write_line(process, first)
        co_runners = CoRunners(processes)
        co_runners.await_all()
        yield co_runners


def _start(stack: ExitStack) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    # Callbacks run in reverse order: kill, then reap.
    stack.callback(process.wait, STOP_GRACE_S)
    stack.callback(process.kill)
    return process


def _write_line(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    try:
        print(line, file=process.stdin)
    except BrokenPipeError as error:
        raise CoRunnerLost from error


def serve_batches(lines: IO[str]) -> None:
    """Read the configuration from the first of `lines`, and run a batch for each further line."""
    data = json.loads(next(lines))
    config = config_module.from_mapping(ProfileConfig, data, "the profiling process")
    runner = ModelRunner.load(config.runner())
    measurer = Measurer(runner, BlockPool(runner.num_blocks).borrow)
    print("ready", flush=True)
    for line in lines:
        measurer.duration_s(tuple((prefix, new) for prefix, new in json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    die_with_parent()
    serve_batches(sys.stdin)
