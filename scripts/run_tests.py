"""Run the tests: first in-process tests in parallel, then tests that start clusters.

Clusters run separately because they compete for the machine's cores, so that tests would miss
deadlines for no fault of the code. Reads TESTS (run only these), PYTEST_ARGS and PYTEST_WORKERS
from the environment, where `make` sets them. With `--slow` only tests marked `slow` run, otherwise
all others; tests named in TESTS run regardless of marks. With `--no-skips` a skipped test makes the
exit status 77.
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
"""Long files first, so that no single process finishes last alone."""
CLUSTERS = ("tests/integration", "tests/robustness")
BYTECODE = ROOT / ".venv" / "bytecode"
"""Bytecode cache shared by all runs: without it, an engine takes 6 s longer to import."""
KERNELS = ("decoder_layer", "layer_range", "token_choice")
"""Kernel modules with the longest compile times."""
NOTHING_COLLECTED = 5
SKIPPED = 77
SUMMARY_WIDTH = 80


def plan() -> list[tuple[str, list[str]]]:
    """The pytest runs, each with its number of xdist workers ("0": a single process)."""
    if chosen := shlex.split(os.environ.get("TESTS", "")):
        return [("0", chosen)]
    workers = os.environ.get("PYTEST_WORKERS", "3")
    runs = [(workers, list(IN_PROCESS)), ("0", list(CLUSTERS))]
    present = [(n, [folder for folder in f if (ROOT / folder).is_dir()]) for n, f in runs]
    return [(n, folders) for n, folders in present if folders]


def selection(slow: bool) -> list[str]:
    """pytest arguments that select by mark."""
    if os.environ.get("TESTS"):
        return []
    return ["-m", "slow" if slow else "not slow"]


def environment() -> dict[str, str]:
    """The environment of this process, with the bytecode cache outside the tree."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(BYTECODE)}


def compile_kernels() -> None:
    """Fill the kernel cache, so that the first engines of the tests do not compile in parallel.

    A build failure is ignored here, since it recurs in the tests that need the kernel.
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
    """Run pytest; returns its exit status, 0 if no tests were collected."""
    own_pid = os.getpid()
    command = [sys.executable, "-m", "pytest", "-n", workers, f"--junitxml={results}", *chosen]
    # Parallel processes with a compute thread per core each would oversubscribe the cores.
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
    """Counts of passed, failed, erroneous and skipped tests from a JUnit file, if it exists."""
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
    """Run the tests and print a summary; returns the first non-zero status, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", action="store_true", help="run only the tests marked slow")
    parser.add_argument("--no-skips", action="store_true", help="fail if a test was skipped")
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
                counts["errors"] = 1  # pytest itself failed or was killed
            totals += counts
    kinds = ("failed", "passed", "skipped", "errors")
    parts = [f"{totals[kind]} {kind}" for kind in kinds if totals[kind]] or ["no tests ran"]
    line = f" {', '.join(parts)} in {time.monotonic() - started_s:.2f}s "
    print("\n" + line.center(SUMMARY_WIDTH, "="), flush=True)
    if arguments.no_skips and totals["skipped"]:
        print("Tests were skipped; the lines SKIPPED above name the missing requirements.")
        statuses.append(SKIPPED)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
