"""Engines that run each batch at the same time as the measured engine.

Workers of one machine share its memory bandwidth, which limits decodes: two at once are a quarter
slower than one. `python -m services.worker.engine.profile.companions` is one companion: it reads
its configuration as JSON from the first line of standard input, then a batch per line, and answers
each line with a line.
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


class CompanionLost(WorkerError):
    """An engine beside the measured one has ended."""

    def __init__(self) -> None:
        super().__init__(
            "an engine that ran beside the measured one has ended, perhaps for lack of memory;"
            " measure fewer at once (--workers)"
        )


class Companions:
    """Engines that have loaded the model; `companions_of` makes them."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    @contextmanager
    def run(self, batch: Chunks) -> Iterator[None]:
        """Have all companions run a batch at the same time. Raises CompanionLost."""
        for process in self._processes:
            _tell(process, json.dumps(batch))
        yield
        self.await_all()

    def await_all(self) -> None:
        """Wait for one answer of each companion. Raises CompanionLost."""
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise CompanionLost


@contextmanager
def companions_of(config: ProfileConfig) -> Iterator[Companions]:
    """Start the configured number of companions; end them afterwards. Raises CompanionLost."""
    first = json.dumps(asdict(config), default=str)
    with ExitStack() as stack:
        processes = [_start(stack) for _ in range(config.companions)]
        for process in processes:
            _tell(process, first)
        companions = Companions(processes)
        companions.await_all()
        yield companions


def _start(stack: ExitStack) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    stack.callback(process.wait, STOP_GRACE_S)
    stack.callback(process.kill)
    return process


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    try:
        print(line, file=process.stdin)
    except BrokenPipeError as error:
        raise CompanionLost from error


def keep_company(lines: IO[str]) -> None:
    """Be a companion until the lines end."""
    data = json.loads(next(lines))
    config = config_module.from_mapping(ProfileConfig, data, "the profiling process")
    runner = ModelRunner.load(config.runner())
    measurer = Measurer(runner, BlockPool(runner.num_blocks))
    print("ready", flush=True)
    for line in lines:
        measurer.duration_s(tuple((prefix, new) for prefix, new in json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    die_with_parent()
    keep_company(sys.stdin)
