"""What safepoints cost: `python -m benchmarks.probes.safepoints`, one JSON object on stdout.

One engine's model without a process around it. Each batch runs without questions between layers,
and as the engine runs one that may be suspended: it looks at a socket before each layer. The two
take turns, and the one that goes first changes. What counts is the time of the processor, since
other processes blur the clock. The intervals between safepoints are those of the clock, as an
online request meets them.

Exit code 2 with a sentence on stderr if it cannot be measured.
"""

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from services.common.clock import monotonic_s
from services.common.lifecycle import EXIT_UNUSABLE
from services.core.planner.batch import Batch, Chunk
from services.core.request import blocks_for
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.interrupt import WatchedInterrupt
from services.worker.errors import WorkerError

GIB = 1 << 30


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="tideserve-profile-safepoints")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    parser.add_argument("--tokens", default="2048", help="sizes of batches, such as 256,2048")
    parser.add_argument("--pairs", type=int, default=8)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.tokens.split(",")]
    try:
        runner = ModelRunner.load(
            RunnerConfig(
                model_dir=arguments.model_dir,
                device="cpu",
                dtype=getattr(torch, arguments.dtype),
                budget_bytes=int(arguments.memory_gib * GIB),
                max_batch_tokens=max(sizes),
                threads=1,
                suspends=True,
            )
        )
    except WorkerError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    try:
        print(json.dumps({"batches": [measure(runner, size, arguments.pairs) for size in sizes]}))
    finally:
        runner.close()


def measure(runner: ModelRunner, tokens: int, pairs: int) -> dict[str, Any]:
    """Seconds of one prompt of so many tokens, in pairs: without safepoints, and with them.

    `interval_s`: of further runs, from the start over each safepoint to the end.
    """
    blocks = tuple(range(blocks_for(tokens, runner.block_size)))
    token_ids = tuple(7 * position % runner.geometry.vocab_size for position in range(tokens))
    batch = Batch((Chunk("safepoints", 0, token_ids, blocks, None),))
    silent, other = socket.socketpair()
    interrupt = WatchedInterrupt(lambda: False, silent.fileno())

    def without() -> float:
        return _took_s(lambda: runner.run_stage(batch))

    def safely() -> float:
        return _took_s(lambda: runner.run_stage(batch, None, interrupt, suspends=True))

    def intervals_s() -> list[float]:
        moments = [monotonic_s()]

        def asked() -> bool:
            moments.append(monotonic_s())
            return False

        runner.run_stage(batch, None, asked, suspends=True)
        return [after - before for before, after in pairwise([*moments, monotonic_s()])]

    found: list[tuple[float, float]] = []
    between_s: list[float] = []
    with silent, other:
        without(), safely()  # the first runs warm up
        for turn in range(pairs):
            if turn % 2:
                after_s = safely()
                found.append((without(), after_s))
            else:
                found.append((without(), safely()))
            between_s += intervals_s()
    return {
        "tokens": tokens,
        "without_s": [one for one, _ in found],
        "with_s": [one for _, one in found],
        "interval_s": between_s,
    }


def _took_s(run: Callable[[], object]) -> float:
    started_s = time.thread_time()
    run()
    return time.thread_time() - started_s


if __name__ == "__main__":
    main()
