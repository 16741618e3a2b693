"""A short run writes the page of each paper, with the reasons for differences."""

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tideserve.cli.commands.main import app
from tideserve.cli.papers import Paper, command
from tideserve.cli.papers.page import Comparison, PaperPage
from tideserve.cli.papers.runs import PageRun

FACTORS = {Paper.BUCKETSERVE: 0.05, Paper.KUNSERVE: 0.1, Paper.CONSERVE: 0.06, Paper.BROS: 0.04}
"""Parts of the simulated time: enough that something runs."""
FIGURES = {
    Paper.KUNSERVE: ("Figure 2", "Figure 12", "Figure 13", "Figure 16", "Figure 17"),
    Paper.CONSERVE: tuple(f"Figure {n}" for n in range(5, 9)),
    Paper.BROS: tuple(f"Figure {n}" for n in range(10, 15)),
    Paper.BUCKETSERVE: tuple(f"Figure {n}" for n in ("2", "3a", "3b", "6a", "6b"))
    + tuple(f"Figure 5{letter}" for letter in "abcdef"),
}


@pytest.mark.parametrize("paper", list(Paper))
def test_a_page_has_all_figures_and_a_note_where_numbers_differ(paper: Paper) -> None:
    steps = list[str]()
    page = command.PAGES[paper](PageRun(1, FACTORS[paper], steps.append))
    assert len(steps) > 5
    html = page.html()
    assert html.count("<svg") == len(page.charts) >= 3
    for figure in FIGURES[paper]:
        assert any(chart.title.startswith(figure) for chart in page.charts), figure
    assert all(row.note for row in page.comparisons if not row.near)
    known = Counter(row.ours is not None for row in page.comparisons)
    assert known[True] > known[False], "most numbers have a counterpart"


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {**command.PAGES, Paper.BROS: _page}
    monkeypatch.setattr(command, "PAGES", pages)
    path = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["simulate", "--paper", "bros", "--page", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_text().startswith("<!doctype html>")
    assert "Figure 1: gain: 2 × in the paper, 3 × here  (differs)" in result.output


def _page(run: PageRun) -> PaperPage:
    run.step("step")
    row = Comparison("Figure 1", "gain", 2.0, 3.0, note="why")
    return PaperPage("T", [], [row], [])


@pytest.mark.parametrize(
    "arguments", [["--page", "x.html"], ["--paper", "bros", "--json", "x.json"]]
)
def test_options_that_contradict_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code != 0
