"""The fault matrix runs in parts: completed cells are kept and not run again."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.errors import BenchError
from benchmarks.faults.judge import STREAMS_MIN, CellVerdict
from benchmarks.faults.matrix import FaultCell
from benchmarks.scenarios import faults
from benchmarks.scenarios.scenario import LoadChoice, TrialVerdict
from benchmarks.systems.system import Deployment

DEPLOYMENT = Deployment(Path("model"), "tiny", Path("cache"), 2, 1 << 28)
COUNTS = {"sent": 40, "completed": 40, "lost": 0, "duplicated": 0, "stuck": 0, "different": 0}
KILLS = "2/(prepare|steady)/.*/kill-worker$"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the cells that were run. Each passes and takes a minute."""
    names: list[str] = []

    def run_cell(_: Deployment, cell: FaultCell, *__: Any) -> CellVerdict:
        names.append(cell.name)
        return CellVerdict(cell, True, STREAMS_MIN, COUNTS, 0, 1.5, 4.0)

    monkeypatch.setattr(faults, "run_cell", run_cell)
    monkeypatch.setattr(faults, "monotonic_s", lambda: 60.0 * len(names))
    yield names


def test_a_failed_cell_names_its_log_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_cell(_: Deployment, cell: FaultCell, __: int, ___: Any, kept: Path, ____: Any) -> Any:
        bad = CellVerdict(cell, True, STREAMS_MIN, COUNTS, 0, 1.5, 4.0, ["request 3 is lost"])
        return replace(bad, logs=kept / "of the cell")

    monkeypatch.setattr(faults, "run_cell", run_cell)
    cell = LoadChoice(quick=True, cells="2/steady/leader")
    (line,) = figures(replace(cell, append=tmp_path / "cells.jsonl"))["said"]
    assert line.startswith("FAILS") and "load before" in line
    assert line.endswith(f"logs: {tmp_path / 'cells.logs' / 'of the cell'}")
    assert "logs" not in orjson.loads((tmp_path / "cells.jsonl").read_bytes())
    (line,) = figures(cell)["said"]
    assert str(Path(tempfile.gettempdir(), "tideserve-faults-")) in line


def figures(choice: LoadChoice) -> Any:
    lines: list[str] = []
    verdict = faults.run(DEPLOYMENT, choice, lines.append, lines.append)
    assert len(verdict.rows) == 9
    return verdict.figures | {"problems": list(verdict.problems), "said": lines}


def test_completed_cells_are_not_run_again(run: list[str], tmp_path: Path) -> None:
    choice = LoadChoice(quick=True, cells=KILLS, append=tmp_path / "cells.jsonl")
    first = figures(replace(choice, minutes=1.5))
    assert len(run) == 2, "the one that passes a minute and a half is the last"
    assert (first["cells"], first["cells_not_run"], first["problems"]) == (2, 2, [])
    second = figures(choice)
    assert len(run) == len(set(run)) == 4
    assert (second["cells"], second["cells_not_run"]) == (4, 0)
    assert second["requests"]["sent"] == 160
    assert second["said"][0].startswith("holds")
    assert figures(choice)["cells"] == 4
    assert len(run) == 4


def test_without_a_file_all_cells_are_run(run: list[str]) -> None:
    result = figures(LoadChoice(quick=True))
    assert result["cells"] == len(run) == 21
    assert {"violations", "requests", "longest_silence_s", "stable_after_s"} <= result.keys()


def test_a_selection_without_cells_is_an_error(run: list[str]) -> None:
    result = figures(LoadChoice(quick=True, cells=KILLS, minutes=-1.0))
    assert run == []
    assert result["problems"] == ["no cell was run"]


def test_minutes_select_random_faults(monkeypatch: pytest.MonkeyPatch, run: list[str]) -> None:
    verdict = TrialVerdict({"drawn": True}, (), ())
    drawn: list[float] = []
    monkeypatch.setattr(
        faults, "run_random", lambda _, minutes, *__: drawn.append(minutes) or verdict
    )
    choice = LoadChoice(minutes=2.0)
    assert faults.run(DEPLOYMENT, choice, print, print) is verdict
    assert (drawn, run) == ([2.0], [])


def test_a_result_file_of_another_command_is_refused(run: list[str], tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    for content in (b"no json\n", b"[1]\n", b'{"size": 2}\n'):
        file.write_bytes(content)
        with pytest.raises(BenchError, match="is not a file of cells"):
            figures(LoadChoice(quick=True, append=file))
    line = orjson.dumps({"size": 2, "phase": "steady", "role": "leader", "fault": "kill-worker"})
    file.write_bytes(line + b"\n" + line + b"\n")
    with pytest.raises(BenchError, match="has a cell twice: 2/steady/leader/kill-worker"):
        figures(LoadChoice(quick=True, append=file))
    assert run == []
