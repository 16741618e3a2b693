"""`faults`: members die, freeze and are cut off in each phase of a change-over, or at random.

Every cell runs on its own cluster with a single failpoint armed. Finished cells are lines of a
file, so that a matrix can be run in parts. With --minutes and neither --cells nor --append, a
cluster of three or more workers is disturbed by random faults and floods for that time instead.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.errors import BenchError
from benchmarks.faults.cell_run import UndisturbedRuns, run_cell
from benchmarks.faults.cluster import logs_folder
from benchmarks.faults.judge import key_of, matrix_figures, matrix_problems
from benchmarks.faults.matrix import FaultCell, describe_cells, fault_cells
from benchmarks.faults.outcomes import request_rows
from benchmarks.faults.random_run import run_random
from benchmarks.scenarios.scenario import GPU, LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from services.common.service_config import ServiceConfig
from services.common.setting import settings_of
from tideserve.cli.tiny_model import DEEP

SEEDS = 8
"""Number of seeds that cells share in turn, so that few undisturbed runs suffice."""
LEASE_S: Any = settings_of(ServiceConfig)["lease_ttl_s"].default


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Run the unfinished cells, or random faults. Raises BenchError."""
    if choice.draws_faults:
        assert choice.minutes is not None
        return run_random(deployment, choice.minutes, choice.seed, say, progress)
    cells = fault_cells(choice.quick, choice.cells)
    lines = read_lines(choice.append)
    done = {key_of(line) for line in lines}
    undisturbed: UndisturbedRuns = {}
    kept, began_s = logs_folder("faults", choice.append), monotonic_s()
    for number, cell in enumerate(cells):
        if (cell.size, cell.phase, cell.role, cell.fault) in done:
            continue
        if choice.minutes is not None and monotonic_s() - began_s > 60 * choice.minutes:
            break
        # A busy machine explains long silences, so record its load with the cell.
        load = os.getloadavg()[0]
        verdict = run_cell(
            deployment, cell, choice.seed + number % SEEDS, undisturbed, kept, progress
        )
        lines.append(line := verdict.line() | {"load_average_before": round(load, 1)})
        # Write each line at once, so that an interrupted matrix can be resumed.
        _append(choice.append, line)
        say(_cell_line(cell, line, verdict.logs))
    figures = matrix_figures(lines, cells, LEASE_S)
    return TrialVerdict(figures, _rows(figures), verdict_problems(figures))


def verdict_problems(figures: Mapping[str, Any]) -> list[str]:
    """The problems of a matrix; cells not run yet are no problem, unless no cell was run."""
    if not figures["by_cell"]:
        return ["no cell was run"]
    return matrix_problems(figures)


def read_lines(path: Path | None) -> list[dict[str, Any]]:
    """The finished cells in a file. Raises BenchError if the file has other content."""
    if path is None or not path.exists():
        return []
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines() if line]
        keys = [key_of(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is not a file of cells: {error}") from error
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise BenchError(f"{path} has a cell twice: {'/'.join(map(str, twice[0]))}")
    return lines


def _append(path: Path | None, line: Mapping[str, Any]) -> None:
    if path is not None:
        with path.open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")


def _cell_line(cell: FaultCell, line: Mapping[str, Any], logs: Path | None) -> str:
    stable = line["stable_after_s"]
    good = line["hit"] and not line["problems"]
    return (
        f"{'holds' if good else 'FAILS'}  {cell.name}: {line['streams']} streams,"
        f" silence {line['longest_silence_s']:.1f} s,"
        f" stable after {'never' if stable is None else f'{stable:.1f} s'},"
        f" load before {line['load_average_before']}"
        + "".join(f"\n       {problem}" for problem in line["problems"][:3])
        + ("" if logs is None else f"\n       logs: {logs}")
    )


def _rows(figures: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    silence = figures["longest_silence_s"]
    return [
        ("cells that count / wanted", f"{figures['cells']} / {figures['cells_wanted']}"),
        ("cells with a problem", str(sum(bool(cell["problems"]) for cell in figures["by_cell"]))),
        ("cells not run yet", str(figures["cells_not_run"])),
        *request_rows(figures["requests"]),
        ("broken invariants", str(figures["violations"])),
        ("longest silence, fault seen at once", _seconds(silence["seen"])),
        ("longest silence, fault not seen", _seconds(silence["unseen"])),
        ("stable again after, at most", _seconds(figures["stable_after_s"])),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


SCENARIO = Scenario(
    name="faults",
    memory="384MiB",
    run=run,
    options=GPU | {"append", "cells", "minutes"},
    tiny_model=DEEP,
    gpu_memory="576MiB",
    random_memory=("64MiB", "256MiB"),
    tiny_dtype="float64",
    details=describe_cells,
)
