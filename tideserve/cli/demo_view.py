"""The demo's screen: bars of memory, groups, the last decision and a comparison of policies.

Pure: converts states to `rich` renderables, or to plain lines without a terminal. Fits a terminal
of 80 columns and 24 lines.
"""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tideserve.cli.demo_state import ClusterSnapshot, FloodProgress, Score, ShownMemory, ShownStage
from tideserve.cli.status import size_text

BAR_CELLS_MIN, BAR_CELLS_MAX = 10, 60
NAME_CELLS = 10
SIZES_CELLS = 36
CHANGES_SHOWN = 3
SAME_MIN = 0.9
"""Ratios between this and its inverse count as equal, because each policy runs once."""
PARAMETERS, KV_USED, KV_FREE, CHANGING = (
    ("█", "blue"),
    ("▓", "yellow"),
    ("░", "green"),
    ("·", "dim"),
)
LEGEND = ((PARAMETERS, "parameters"), (KV_USED, "KV in use"), (KV_FREE, "KV free"))


def screen(
    title: str, progress: FloodProgress, snapshot: ClusterSnapshot, scores: Sequence[Score]
) -> Group:
    """The screen; the last of `scores` belongs to the running policy."""
    score = scores[-1]
    head = Text.assemble((score.policy, "bold"), f"  {progress.elapsed_s:.0f} s   ")
    head.append(title, "yellow")
    changes = "; ".join(score.changes[-CHANGES_SHOWN:]) or "none yet"
    lines: list[RenderableType] = [
        head,
        _row("requests", requests_text(progress, score)),
        _legend(),
        *map(_WorkerLine, snapshot.workers),
        _row("groups", groups_text(snapshot.groups)),
        _row("changes", changes),
        _row("decided", snapshot.decision or "none yet", wraps=True),
        Text(),
    ]
    return Group(*lines, scores_table(scores))


class _WorkerLine:
    """A worker's bar, whose width adapts to the terminal within bounds."""

    def __init__(self, worker: ShownMemory) -> None:
        self._worker = worker

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - NAME_CELLS - SIZES_CELLS
        yield worker_line(self._worker, max(BAR_CELLS_MIN, min(BAR_CELLS_MAX, room)))


def worker_line(worker: ShownMemory, cells: int) -> Text:
    """A bar of the worker's memory and the sizes of its parts."""
    parts = (worker.parameter_bytes, worker.kv_used_bytes, worker.kv_free_bytes)
    line = Text(f"{worker.worker_id:<{NAME_CELLS}}", no_wrap=True)
    for (character, style), count in zip(
        (PARAMETERS, KV_USED, KV_FREE, CHANGING),
        bar_cells(parts, worker.arena_bytes, cells),
        strict=True,
    ):
        line.append(character * count, style)
    used, total = worker.kv_used_bytes, worker.kv_used_bytes + worker.kv_free_bytes
    line.append(
        f"  {size_text(worker.parameter_bytes)} + KV {size_text(used)} of {size_text(total)}"
    )
    return line


def bar_cells(parts: Sequence[int], whole: int, cells: int) -> list[int]:
    """Cells of each part and of the rest of `whole`; their sum is always `cells`.

    The sum of the parts may exceed the whole for a while, because reports differ in time.
    """
    whole = max(whole, sum(parts), 1)
    counts, reached, drawn = [], 0, 0
    for part in parts:
        reached += part
        end = round(cells * reached / whole)
        counts.append(end - drawn)
        drawn = end
    return [*counts, cells - drawn]


def requests_text(progress: FloodProgress, score: Score) -> str:
    """Counts of requests by state."""
    return (
        f"{progress.due} of {score.planned} sent: {progress.running} running,"
        f" {progress.waiting} waiting for memory, {score.completed} completed"
    )


def groups_text(groups: Sequence[Sequence[ShownStage]]) -> str:
    """Groups separated by bars; arrows join the stages of a merged group."""
    return "  |  ".join(_group_text(stages) for stages in groups) or "none"


def scores_table(scores: Sequence[Score]) -> Table:
    """The figures, with a column per policy."""
    table = Table(box=SIMPLE, header_style="bold", padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    for score in scores:
        table.add_column(score.policy, justify="right")
    table.add_row("requests completed", *(f"{s.completed} of {s.planned}" for s in scores))
    if any(score.failed for score in scores):
        table.add_row("failed or too late", *(str(score.failed) for score in scores))
    table.add_row("time to first token, median", *(seconds_text(s.ttft_p50_s) for s in scores))
    table.add_row("time to first token, p99", *(seconds_text(s.ttft_p99_s) for s in scores))
    table.add_row("time per further token, median", *(millis_text(s.tpot_p50_s) for s in scores))
    table.add_row("duration of the burst", *(seconds_text(s.took_s) for s in scores))
    table.add_row("largest KV cache, tokens", *(f"{score.kv_tokens_max:,}" for score in scores))
    table.add_row("preemptions (recomputed)", *(str(score.preemptions) for score in scores))
    table.add_row("merges", *(str(score.merges) for score in scores))
    return table


def outcome(score: Score) -> str:
    """A line about the burst under a policy."""
    parts = [f"{score.policy}: {score.completed} of {score.planned} completed", *score.changes]
    return "; ".join(parts)


def conclusion(scores: Sequence[Score]) -> str:
    """A sentence that compares median and P99 TTFT of the last policy with the first."""
    base, other = scores[0], scores[-1]
    median = _compared(base.ttft_p50_s, other.ttft_p50_s)
    p99 = _compared(base.ttft_p99_s, other.ttft_p99_s)
    if median is None or p99 is None:
        return f"no comparison: {base.policy} or {other.policy} has no figures"
    return (
        f"The wait for the first token with {other.policy}, compared with {base.policy}: the median"
        f" is {median}, the p99 {p99}."
    )


def _compared(base_s: float | None, other_s: float | None) -> str | None:
    """How much shorter or longer `other_s` is than `base_s`; None if either is missing."""
    if base_s is None or other_s is None:
        return None
    times_shorter = base_s / max(other_s, 1e-3)
    if SAME_MIN < times_shorter < 1 / SAME_MIN:
        return "about the same"
    if times_shorter > 1:
        return f"{times_shorter:.1f} times shorter"
    return f"{1 / times_shorter:.1f} times longer"


def plain_line(progress: FloodProgress, snapshot: ClusterSnapshot, score: Score) -> str:
    """A line of progress for output without a terminal."""
    workers = ", ".join(
        f"{worker.worker_id} parameters {_share(worker.parameter_bytes, worker)}"
        f" KV in use {_share(worker.kv_used_bytes, worker)}"
        f" free {_share(worker.kv_free_bytes, worker)}"
        for worker in snapshot.workers
    )
    return (
        f"{score.policy} {progress.elapsed_s:.0f} s: {workers};"
        f" groups {groups_text(snapshot.groups)}; {requests_text(progress, score)};"
        f" TTFT p50 {seconds_text(score.ttft_p50_s)} p99 {seconds_text(score.ttft_p99_s)}"
    )


def seconds_text(seconds: float | None) -> str:
    """A latency in seconds as text."""
    return "–" if seconds is None else f"{seconds:.2f} s"


def millis_text(seconds: float | None) -> str:
    """A latency in milliseconds as text."""
    return "–" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _row(name: str, text: str, wraps: bool = False) -> Text:
    return Text.assemble(
        (f"{name:<{NAME_CELLS}}", "dim"), text, overflow="ellipsis", no_wrap=not wraps
    )


def _legend() -> Text:
    line = Text(" " * NAME_CELLS)
    for (character, style), name in LEGEND:
        line.append(character * 2, style).append(f" {name}   ")
    return line


def _group_text(stages: Sequence[ShownStage]) -> str:
    if len(stages) == 1:
        return f"{stages[0].worker_id} (all layers)"
    runs = (
        f"{stage.worker_id} (layers {stage.first_layer}-{stage.end_layer - 1})" for stage in stages
    )
    return "merged: " + " → ".join(runs)


def _share(part_bytes: int, worker: ShownMemory) -> str:
    return f"{part_bytes / worker.arena_bytes:.0%}"
