"""Print how well workers predicted their iterations: `prediction_error.py EVENT_LOG_FOLDER`.

Reads the event logs of workers (`event_log`). Prints a row per worker: the number of iterations
and the median relative error of their predicted times, before the first refinement or profile
(with the model of the start), and from a minute after the first iteration on. Exit status 1 if a
median exceeds `--start-max` or `--later-max`.
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
    exceeded = False
    for path in sorted(arguments.folder.glob("worker-*.jsonl")):
        model = read_config(path, MemberConfig).planner.cost_model
        ran = list(predicted_iterations(model, read_entries(path, WORKER_TYPES)))
        start = [one.error for one in ran if not one.models]
        later = [one.error for one in ran if one.ended_s > ran[0].ended_s + MINUTE_S]
        row = []
        for errors, most in ((start, arguments.start_max), (later, arguments.later_max)):
            row.append(f"{len(errors)} iterations, median {_percent(errors)}")
            exceeded = exceeded or (bool(errors) and median(errors) > most)
        learned = ran[-1].models if ran else 0
        print(f"{path.name}: at the start {row[0]}; after a minute {row[1]}; {learned} refinements")
    return int(exceeded)


def _percent(errors: list[float]) -> str:
    return f"{100 * median(errors):.1f} %" if errors else "-"


if __name__ == "__main__":
    sys.exit(main())
