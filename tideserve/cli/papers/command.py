"""`tideserve simulate --paper`: writes a page with a paper's figures beside the simulator's."""

from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.errors import ConfigError
from tideserve.cli.errors import unusable
from tideserve.cli.papers import Paper, bros, bucketserve, conserve, kunserve
from tideserve.cli.papers.page import PaperPage, value_text
from tideserve.cli.papers.runs import PageRun
from tideserve.cli.report import Report
from tideserve.cli.simulate import check_writable

PAGES: Mapping[Paper, Callable[[PageRun], PaperPage]] = {
    Paper.KUNSERVE: kunserve.page,
    Paper.CONSERVE: conserve.page,
    Paper.BROS: bros.page,
    Paper.BUCKETSERVE: bucketserve.page,
}


def run_paper(paper: Paper, seed: int | None, path: Path | None, factor: float = 1.0) -> None:
    """Run the simulations of a paper and write its page. Raises CommandError.

    `path` None: a file named like the paper in the current folder. `factor`: of the durations.
    """
    path = path or Path(f"{paper}.html")
    check_writable(path)
    report = Report()
    with report.step(f"Simulating the figures of {paper}"), unusable(ConfigError, OSError):
        page = PAGES[paper](PageRun(seed or 0, factor, report.doing))
        path.write_text(page.html(), encoding="utf-8")
    for row in page.comparisons:
        paper_text, ours = (value_text(value, row.unit) for value in (row.paper, row.ours))
        mark = "" if row.near or row.paper is None else "  (differs)"
        report.line(f"{row.figure}: {row.quantity}: {paper_text} in the paper, {ours} here{mark}")
    report.line(f"page written to {path}")
