"""The demo on the screen: bars of memory, groups, the last decision, the policies side by side.

Pure: from states to what `rich` draws, or to plain lines where there is no terminal. It fits on a
terminal of 80 columns and 24 lines.
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
"""Figures of one run whose ratio is nearer to 1 than this count as equal."""
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
    """The whole view; the last of `scores` is that of the policy that runs."""
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
        _row("decided", snapshot.decision or "nothing yet", wraps=True),
        Text(),
    ]
    return Group(*lines, scores_table(scores))


class _WorkerLine:
    """A bar as wide as the terminal allows, within bounds."""

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
    """Cells of each part, and of what is left of `whole`; together always `cells`.

    Parts may come from reports of different moments, so their sum may exceed the whole for a while.
    """
    whole = max(whole, sum(parts), 1)
    found, reached, drawn = [], 0, 0
    for part in parts:
        reached += part
        end = round(cells * reached / whole)
        found.append(end - drawn)
        drawn = end
    return [*found, cells - drawn]


def requests_text(progress: FloodProgress, score: Score) -> str:
    """Where the requests are."""
    return (
        f"{progress.due} of {score.planned} sent: {progress.running} run,"
        f" {progress.waiting} wait for memory, {score.completed} answered"
    )


def groups_text(groups: Sequence[Sequence[ShownStage]]) -> str:
    """Groups separated by bars, the stages of a merged one joined by arrows."""
    return "  |  ".join(_group_text(stages) for stages in groups) or "none"


def scores_table(scores: Sequence[Score]) -> Table:
    """One column for each policy."""
    table = Table(box=SIMPLE, header_style="bold", padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    for score in scores:
        table.add_column(score.policy, justify="right")
    table.add_row("requests answered", *(f"{s.completed} of {s.planned}" for s in scores))
    if any(score.failed for score in scores):
        table.add_row("failed or too late", *(str(score.failed) for score in scores))
    table.add_row("time to first token, median", *(seconds_text(s.ttft_p50_s) for s in scores))
    table.add_row("time to first token, p99", *(seconds_text(s.ttft_p99_s) for s in scores))
    table.add_row("time per further token, median", *(millis_text(s.tpot_p50_s) for s in scores))
    table.add_row("the whole flood took", *(seconds_text(s.took_s) for s in scores))
    table.add_row("KV cache at most, tokens", *(f"{score.kv_tokens_max:,}" for score in scores))
    table.add_row("preempted, to compute anew", *(str(score.preemptions) for score in scores))
    table.add_row("merges", *(str(score.merges) for score in scores))
    return table


def outcome(score: Score) -> str:
    """How the flood went under one policy, in a line."""
    parts = [f"{score.policy}: {score.completed} of {score.planned} answered", *score.changes]
    return "; ".join(parts)


def conclusion(scores: Sequence[Score]) -> str:
    """The P99 wait of the last policy compared with that of the first, in a sentence."""
    base, other = scores[0], scores[-1]
    if base.ttft_p99_s is None or other.ttft_p99_s is None:
        return f"nothing to compare: {base.policy} or {other.policy} has no figures"
    times_shorter = base.ttft_p99_s / max(other.ttft_p99_s, 1e-3)
    wait, policies = "The p99 wait for the first token is", (other.policy, base.policy)
    if SAME_MIN < times_shorter < 1 / SAME_MIN:
        return "{} about the same with {} and {}.".format(wait, *policies)
    if times_shorter > 1:
        return "{} {:.1f} times shorter with {} than with {}.".format(
            wait, times_shorter, *policies
        )
    return "{} {:.1f} times longer with {} than with {}.".format(wait, 1 / times_shorter, *policies)


def plain_line(progress: FloodProgress, snapshot: ClusterSnapshot, score: Score) -> str:
    """One line of progress where there is no terminal."""
    workers = ", ".join(
        f"{one.worker_id} parameters {_share(one.parameter_bytes, one)}"
        f" KV in use {_share(one.kv_used_bytes, one)} free {_share(one.kv_free_bytes, one)}"
        for one in snapshot.workers
    )
    return (
        f"{score.policy} {progress.elapsed_s:.0f} s: {workers};"
        f" groups {groups_text(snapshot.groups)}; {requests_text(progress, score)};"
        f" TTFT p50 {seconds_text(score.ttft_p50_s)} p99 {seconds_text(score.ttft_p99_s)}"
    )


def seconds_text(seconds: float | None) -> str:
    """A latency for people."""
    return "–" if seconds is None else f"{seconds:.2f} s"


def millis_text(seconds: float | None) -> str:
    """A short latency for people."""
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
    runs = (f"{one.worker_id} (layers {one.first_layer}-{one.end_layer - 1})" for one in stages)
    return "merged: " + " → ".join(runs)


def _share(part_bytes: int, worker: ShownMemory) -> str:
    return f"{part_bytes / worker.arena_bytes:.0%}"
