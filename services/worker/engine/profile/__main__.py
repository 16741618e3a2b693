"""Profiles a model on a device, as a process that `tideserve profile` starts.

`python -m services.worker.engine.profile` reads its configuration as YAML from standard input and
writes a JSON object per line to standard output: `progress` while it measures, then `result`, or
`error` with a message and exit code 2.

A profile has the coefficients of a cost model, which predicts the duration of a batch. They are
fitted to some measured batches; held-out batches validate the fit.
"""

import json
import os
import sys
from typing import Any

from services.common import config as config_module
from services.common.clock import monotonic_s
from services.common.device_profile import store_profile, to_mapping
from services.common.errors import ServiceError
from services.common.lifecycle import EXIT_UNUSABLE, die_with_parent
from services.core.cost.model import CostModel, Sample
from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.profile.co_runners import CoRunners, start_co_runners
from services.worker.engine.profile.config import ProfileConfig
from services.worker.engine.profile.host_link import measure_host_link
from services.worker.engine.profile.measurer import Measurer, batch_limits_of
from services.worker.engine.profile.session import (
    ProfileOutcome,
    ProfileSession,
    measured_profile,
    profile_path,
)
from services.worker.errors import WorkerError

PROGRESS_INTERVAL_S = 0.5


def main() -> None:
    """Profile and store; exits with code 2 if the model, the device or the folder is unusable."""
    die_with_parent()
    try:
        data = config_module.parse_yaml(sys.stdin.read(), "standard input")
        config = config_module.from_mapping(ProfileConfig, data, "standard input")
        write_message("result", profile(config))
    except (WorkerError, ServiceError) as error:
        write_message("error", str(error))
        sys.exit(EXIT_UNUSABLE)
    except OSError as error:
        write_message("error", f"the profile cannot be written: {error}")
        sys.exit(EXIT_UNUSABLE)


def profile(config: ProfileConfig) -> dict[str, Any]:
    """Measure, fit and store a profile; returns the output of `tideserve profile --json`."""
    started_s = monotonic_s()
    runner_config = config.runner()
    runner = ModelRunner.load(runner_config)
    try:
        limits = batch_limits_of(runner, config.max_batch_tokens, config.max_running)
        session = ProfileSession(config.effort, limits)
        measurer = Measurer(runner, BlockPool(runner.num_blocks).borrow)
        with start_co_runners(config) as co_runners:
            measure(session, measurer, co_runners)
        outcome = session.outcome(measurer.cpu_share)
        link = measure_host_link(config.device)
        measured = measured_profile(runner, runner_config, config.threads, outcome, link)
    finally:
        runner.close()
    path = profile_path(config.profile_dir, runner_config, config.threads)
    store_profile(measured, path)
    load_1m = os.getloadavg()[0]
    return summary(outcome) | {
        "profile": to_mapping(measured),
        "path": str(path),
        "took_s": monotonic_s() - started_s,
        "load_average_1m": load_1m,
    }


def measure(session: ProfileSession, measurer: Measurer, co_runners: CoRunners) -> None:
    """Run the session to completion and report progress. Raises WorkerError."""

    def duration_s() -> float:
        batch = session.next_batch()
        with co_runners.run(batch):
            measured_s = measurer.duration_s(batch)
        assert measured_s is not None, "profiling has no interrupt"
        return measured_s

    # Discard the first batch, which includes lazy initialization and first touches of memory.
    duration_s()
    reported_s = 0.0
    while not session.complete:
        session.record(duration_s())
        if monotonic_s() - reported_s > PROGRESS_INTERVAL_S:
            reported_s = monotonic_s()
            done, wanted = session.progress
            write_message("progress", {"done": done, "wanted": wanted})


def summary(outcome: ProfileOutcome) -> dict[str, Any]:
    """Return the outcome as JSON types."""
    accuracy = outcome.accuracy
    return {
        "error": accuracy.error,
        "error_without_prefix": accuracy.error_without_prefix,
        "error_with_prefix": accuracy.error_with_prefix,
        "noise": accuracy.noise,
        "error_max": outcome.error_max,
        "passed": outcome.passed,
        "quiet": outcome.quiet and not outcome.crowded,
        "cpu_share": outcome.cpu_share,
        "rounds": outcome.rounds,
        "kinds": [
            {"kind": kind, "batches": count, "error": error}
            for kind, (count, error) in outcome.errors_by_kind.items()
        ],
        "points": [
            *(batch_entry(outcome.model, sample, False) for sample in outcome.fitted),
            *(batch_entry(outcome.model, sample, True) for sample in outcome.held_out),
        ],
    }


def batch_entry(model: CostModel, sample: Sample, held_out: bool) -> dict[str, Any]:
    """Return a batch with its measured and its predicted duration, as JSON types."""
    return {
        "chunks": sample.chunks,
        "held_out": held_out,
        "measured_s": sample.measured_s,
        "predicted_s": model.batch_s(sample.chunks),
    }


def write_message(kind: str, value: Any) -> None:
    """Write a line of output for `tideserve profile`."""
    print(json.dumps({kind: value}), flush=True)


if __name__ == "__main__":
    main()
