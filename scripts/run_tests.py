"""Run the tests: first those within a process, side by side, then those that start clusters.

The two runs differ because clusters compete for the machine's cores, which would fail deadlines
that say nothing about the code. Reads TESTS (run just these), PYTEST_ARGS and PYTEST_WORKERS from
the environment, where `make` puts them. With `--slow` only the tests marked `slow` run, otherwise
all others; tests that are named in TESTS run whatever they are marked. With `--no-skips` a skipped
test makes the exit status 77.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from long_step import end_with_parent

ROOT = Path(__file__).resolve().parent.parent
IN_PROCESS = ("tests/component", "tests/unit")
"""The longer files first, so that no process ends the run alone."""
CLUSTERS = ("tests/integration", "tests/robustness")
BYTECODE = ROOT / ".venv" / "bytecode"
"""Kept for all processes of all runs: an engine that compiles what it imports takes 6 s longer."""
KERNELS = ("decoder_layer", "layer_range", "token_choice")
"""Modules of kernels that take longest to compile."""
NOTHING_COLLECTED = 5
SKIPPED = 77
SUMMARY_WIDTH = 80


def plan() -> list[tuple[str, list[str]]]:
    """The pytest runs to do, each with its number of xdist workers ("0": in one process)."""
    if chosen := shlex.split(os.environ.get("TESTS", "")):
        return [("0", chosen)]
    workers = os.environ.get("PYTEST_WORKERS", "3")
    runs = [(workers, list(IN_PROCESS)), ("0", list(CLUSTERS))]
    present = [(n, [folder for folder in f if (ROOT / folder).is_dir()]) for n, f in runs]
    return [(n, folders) for n, folders in present if folders]


def selection(slow: bool) -> list[str]:
    """pytest's arguments that choose by mark."""
    if os.environ.get("TESTS"):
        return []
    return ["-m", "slow" if slow else "not slow"]


def environment() -> dict[str, str]:
    """The environment of this process, but bytecode is kept outside the tree."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(BYTECODE)}


def compile_kernels() -> None:
    """Fill their cache, so that the first engines of the tests do not all compile the same.

    A build that fails here fails again in the tests that need it.
    """
    own_pid, package = os.getpid(), "services.worker.engine.model.cpu_kernels"
    compiling = [
        subprocess.Popen(
            [sys.executable, "-m", package, name],
            cwd=ROOT,
            env=environment(),
            preexec_fn=lambda: end_with_parent(own_pid),  # noqa: PLW1509 - there are no threads
        )
        for name in KERNELS
    ]
    for process in compiling:
        process.wait()


def run_pytest(workers: str, paths: list[str], results: Path, chosen: list[str]) -> int:
    """pytest's exit status; 0 when there was nothing to run, as in a folder still empty."""
    own_pid = os.getpid()
    command = [sys.executable, "-m", "pytest", "-n", workers, f"--junitxml={results}", *chosen]
    # Processes side by side, each with a compute thread per core, would wait for one another.
    threads = {} if workers == "0" else {"OMP_NUM_THREADS": "1"}
    status = subprocess.run(
        [*command, *shlex.split(os.environ.get("PYTEST_ARGS", "")), *paths],
        cwd=ROOT,
        env=environment() | threads,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: end_with_parent(own_pid),
        check=False,
    ).returncode
    return 0 if status == NOTHING_COLLECTED else status


def count(results: Path) -> Counter[str]:
    """How many tests passed, failed, erred and were skipped, from a JUnit file if there is one."""
    totals: Counter[str] = Counter()
    if not results.is_file():
        return totals
    for suite in ElementTree.parse(results).getroot().iter("testsuite"):
        number = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
        totals["failed"] += number["failures"]
        totals["errors"] += number["errors"]
        totals["skipped"] += number["skipped"]
        totals["passed"] += int(suite.get("tests", 0)) - sum(number.values())
    return totals


def main() -> int:
    """The first non-zero status of a run, else 0; prints a summary over all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", action="store_true", help="the tests marked slow, no others")
    parser.add_argument("--no-skips", action="store_true", help="fail when a test was skipped")
    arguments = parser.parse_args()
    chosen = selection(arguments.slow)
    started_s = time.monotonic()
    totals: Counter[str] = Counter()
    statuses = []
    with tempfile.TemporaryDirectory() as folder:
        if not os.environ.get("TESTS"):
            compile_kernels()
        for number, (workers, paths) in enumerate(plan()):
            results = Path(folder) / f"{number}.xml"
            print(f"==> pytest {' '.join(paths)}", flush=True)
            statuses.append(run_pytest(workers, paths, results, chosen))
            counts = count(results)
            if statuses[-1] and not (counts["failed"] or counts["errors"]):
                counts["errors"] = 1  # pytest itself could not run, or was ended
            totals += counts
    kinds = ("failed", "passed", "skipped", "errors")
    parts = [f"{totals[kind]} {kind}" for kind in kinds if totals[kind]] or ["no tests ran"]
    line = f" {', '.join(parts)} in {time.monotonic() - started_s:.2f}s "
    print("\n" + line.center(SUMMARY_WIDTH, "="), flush=True)
    if arguments.no_skips and totals["skipped"]:
        print("Tests were skipped; pytest's lines SKIPPED above name what is missing.")
        statuses.append(SKIPPED)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
