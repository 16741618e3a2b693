"""Steps on a GPU with limited time: deadlines, the total budget and the table."""

import json
from pathlib import Path

from benchmarks.gpu_steps.figures import Figures
from benchmarks.gpu_steps.minutes import END_S, GpuStep, Minutes, numbers_of


def test_a_step_ends_at_its_deadline_and_the_others_keep_their_figures(tmp_path: Path) -> None:
    minutes = Minutes(tmp_path, None, 60.0, dry=True)
    assert not minutes.run(GpuStep("late", "environment", 0.001)), "no Python starts so fast"
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["steps"]["late"]["ended"] == "cut off after 0 s"
    assert minutes.run(GpuStep("whole", "environment", 60.0))
    written = json.loads((tmp_path / "figures.json").read_text())
    assert list(written["steps"]) == ["late", "whole"]
    assert written["steps"]["whole"]["figures"]["versions"]["cores"] > 0


def test_no_step_begins_without_time_to_end(tmp_path: Path) -> None:
    minutes = Minutes(tmp_path, None, END_S, dry=True)
    assert not minutes.run(GpuStep("never", "environment", 60.0))
    assert minutes.results["never"] == {"ended": "no time left"}
    assert "no time left" in minutes.table()


def test_a_part_that_fails_keeps_its_cause_and_the_other_parts(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    figures = Figures(path)
    figures.measure("before", lambda: 1.5)
    figures.measure("broken", lambda: {}["missing"])
    figures.measure("after", lambda: {"ms": 2.5})
    written = json.loads(path.read_text())
    assert figures.failed
    assert (written["before"], written["after"]) == (1.5, {"ms": 2.5})
    assert written["broken_failed"].startswith("KeyError: ") and "broken" not in written


def test_the_table_has_numbers_and_short_texts_of_all_depths() -> None:
    figures = {"a": {"b": 1.25, "worker_logs": {"w": ["line"]}}, "c_took_s": 3, "d": [1, 2]}
    assert dict(numbers_of(figures)) == {"a.b": "1.25", "d": "1 2"}
