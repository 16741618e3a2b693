"""The demo on the screen: bars of memory, groups, the last decision, the policies side by side.

Pure: from states to what `rich` draws, or to plain lines where there is no terminal.
"""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cli.demo_state import Score, Snapshot, Stage, WorkerMemory
from cli.status import size_text

BAR_CELLS = 48
PARAMETERS, KV_USED, KV_FREE, CHANGING = (
    ("█", "blue"),
    ("▓", "yellow"),
    ("░", "green"),
    ("·", "dim"),
)
LEGEND = ((PARAMETERS, "parameters"), (KV_USED, "KV used"), (KV_FREE, "KV free"))


def screen(title: str, elapsed_s: float, snapshot: Snapshot, scores: Sequence[Score]) -> Group:
    """The whole view; the last of `scores` is that of the policy that runs."""
    head = Text.assemble((scores[-1].policy, "bold"), f"  {elapsed_s:.0f} s   ", (title, "yellow"))
    lines = [head, _legend()]
    lines += [worker_line(worker) for worker in snapshot.workers]
    lines.append(Text.assemble(("groups    ", "dim"), groups_text(snapshot.groups)))
    lines.append(Text.assemble(("decided   ", "dim"), snapshot.decision or "nothing yet"))
    return Group(*lines, scores_table(scores))


def worker_line(worker: WorkerMemory) -> Text:
    """A bar of the worker's memory and the sizes of its parts."""
    parts = (worker.parameter_bytes, worker.kv_used_bytes, worker.kv_free_bytes)
    line = Text(f"{worker.worker_id:<10}")
    for (character, style), cells in zip(
        (PARAMETERS, KV_USED, KV_FREE, CHANGING), bar_cells(parts, worker.arena_bytes), strict=True
    ):
        line.append(character * cells, style)
    used, total = worker.kv_used_bytes, worker.kv_used_bytes + worker.kv_free_bytes
    line.append(f"  {size_text(worker.parameter_bytes)} + KV {size_text(used)}/{size_text(total)}")
    return line


def bar_cells(parts: Sequence[int], whole: int, cells: int = BAR_CELLS) -> list[int]:
    """Cells of each part, and of what is left of `whole`; together always `cells`.

    Reports of one moment may come from two, so that the parts are more than the whole for a while.
    """
    whole = max(whole, sum(parts), 1)
    found, reached, drawn = [], 0, 0
    for part in parts:
        reached += part
        end = round(cells * reached / whole)
        found.append(end - drawn)
        drawn = end
    return [*found, cells - drawn]


def groups_text(groups: Sequence[Sequence[Stage]]) -> str:
    """Groups separated by bars, the stages of a merged one joined by arrows."""
    return "  |  ".join(_group_text(stages) for stages in groups) or "none"


def scores_table(scores: Sequence[Score]) -> Table:
    """One column for each policy."""
    table = Table(box=SIMPLE, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for score in scores:
        table.add_column(score.policy, justify="right")
    table.add_row("requests answered", *(f"{s.completed} of {s.planned}" for s in scores))
    if any(score.failed for score in scores):
        table.add_row("failed or too late", *(str(score.failed) for score in scores))
    table.add_row("time to first token, p50", *(seconds_text(s.ttft_p50_s) for s in scores))
    table.add_row("p99", *(seconds_text(s.ttft_p99_s) for s in scores))
    table.add_row("preemptions", *(str(score.preemptions) for score in scores))
    table.add_row("merges", *(str(score.merges) for score in scores))
    return table


def plain_line(elapsed_s: float, snapshot: Snapshot, score: Score) -> str:
    """One line for where no terminal is."""
    workers = ", ".join(
        f"{one.worker_id} parameters {_share(one.parameter_bytes, one)}"
        f" KV used {_share(one.kv_used_bytes, one)} free {_share(one.kv_free_bytes, one)}"
        for one in snapshot.workers
    )
    return (
        f"{score.policy} {elapsed_s:.0f} s: {workers}; groups {groups_text(snapshot.groups)};"
        f" answered {score.completed} of {score.planned}, TTFT p50"
        f" {seconds_text(score.ttft_p50_s)} p99 {seconds_text(score.ttft_p99_s)}"
    )


def seconds_text(seconds: float | None) -> str:
    """A latency for people."""
    return "–" if seconds is None else f"{seconds:.2f} s"


def _legend() -> Text:
    line = Text(" " * 10)
    for (character, style), name in LEGEND:
        line.append(character * 2, style).append(f" {name}   ")
    return line


def _group_text(stages: Sequence[Stage]) -> str:
    if len(stages) == 1:
        return f"{stages[0].worker_id} (all layers)"
    runs = (f"{one.worker_id} (layers {one.first_layer}-{one.end_layer - 1})" for one in stages)
    return "merged: " + " → ".join(runs)


def _share(part_bytes: int, worker: WorkerMemory) -> str:
    return f"{part_bytes / worker.arena_bytes:.0%}"
