"""Print how well workers predicted their iterations: `prediction_error.py EVENT_LOG_FOLDER`.

Reads the event logs of workers (`event_log`). Prints a row per worker: the number of iterations
and the median relative error of their predicted times, before the first refinement or profile
(with the model of the start), and from a minute after the first iteration on. Exit status 1 if a
median exceeds `--start-max` or `--later-max`, 2 if there is no log, or one without predicted
iterations after a minute.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

from services.common.event_log import read_config, read_entries
from services.core.changeover.state import MemberConfig
from tideserve.sim.prediction import predicted_iterations
from tideserve.sim.replay import WORKER_TYPES

MINUTE_S = 60.0


def main() -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start-max", type=float, default=0.25)
    parser.add_argument("--later-max", type=float, default=0.15)
    arguments = parser.parse_args()
    logs = sorted(arguments.folder.glob("worker-*.jsonl"))
    if not logs:
        print(
            f"{arguments.folder} has no event log of a worker: start the cluster with 'event_log'",
            file=sys.stderr,
        )
        return 2
    return max(_status(path, arguments.start_max, arguments.later_max) for path in logs)


def _status(path: Path, start_max: float, later_max: float) -> int:
    """Print the row of a worker; returns its exit status."""
    model = read_config(path, MemberConfig).planner.cost_model
    ran = list(predicted_iterations(model, read_entries(path, WORKER_TYPES)))
    start = [iteration.error for iteration in ran if not iteration.models]
    later = [i.error for i in ran if i.ended_s > ran[0].ended_s + MINUTE_S]
    learned = ran[-1].models if ran else 0
    print(
        f"{path.name}: at the start {_summary(start)}; after a minute {_summary(later)};"
        f" {learned} refinements"
    )
    if not later:
        print(
            f"{path.name} has no predicted iteration a minute after the first: run the load longer",
            file=sys.stderr,
        )
        return 2
    return int((bool(start) and median(start) > start_max) or median(later) > later_max)


def _summary(errors: list[float]) -> str:
    return f"{len(errors)} iterations, median {_percent(errors)}"


def _percent(errors: list[float]) -> str:
    return f"{100 * median(errors):.1f} %" if errors else "-"


if __name__ == "__main__":
    sys.exit(main())
