"""The view and the arithmetic of the demo, from recorded states."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tideserve.cli.demo import TITLE, requests_of_flood
from tideserve.cli.demo_state import ClusterSnapshot, FloodProgress, Score, snapshot_of
from tideserve.cli.demo_view import bar_cells, conclusion, outcome, plain_line, scores_table, screen
from tideserve.cli.model_folder import check_model_folder
from tideserve.cli.tiny_model import CONFIG, DEEP, VOCABULARY, write_tiny_model
from tideserve.load.record import RequestOutcome, SentRequest

MIB = 1 << 20
SHAPE = {"num_layers": 16, "kv_bytes": 512}


def worker(name: str, parameters: int, total: int, free: int, layers: int) -> dict[str, Any]:
    """A worker's row in the status; parameters in MiB, blocks, layers that it runs."""
    block_bytes = layers * SHAPE["kv_bytes"] * 16
    return {
        "id": name,
        "parameter_bytes": parameters * MIB,
        "kv_blocks_total": total,
        "kv_blocks_free": free,
        "kv_used_bytes": (total - free) * block_bytes,
        "kv_free_bytes": free * block_bytes,
        "preemptions_total": 2,
        "running": 3,
        "block_size": 16,
        "arena_bytes": 26 * MIB,
        "shape": SHAPE,
    }


def group(epoch: int, **layers: tuple[int, int]) -> dict[str, Any]:
    return {
        "id": "g",
        "epoch": epoch,
        "members": list(layers),
        "layers": [list(run) for run in layers.values()],
    }


ALONE = {
    "workers": [worker("a", 18, 64, 0, 16), worker("b", 18, 64, 32, 16)],
    "groups": [group(1, a=(0, 16)), group(1, b=(0, 16))],
    "decisions": [],
}
MERGED = {
    "workers": [worker("a", 10, 256, 64, 8), worker("b", 10, 256, 0, 8)],
    "groups": [group(2, a=(0, 8), b=(8, 16))],
    "decisions": [
        {
            "action": "merge",
            "cause": "overload",
            "group_ids": ["a", "b"],
            "needed_tokens": 900,
            "demand_tokens": 2900,
            "forecast_tokens": 400,
            "threshold_tokens": 2048,
        }
    ],
}


def record(ttft_s: float, outcome: RequestOutcome = RequestOutcome.COMPLETED) -> SentRequest:
    times = (1.0 + ttft_s, 3.0) if outcome is RequestOutcome.COMPLETED else ()
    return SentRequest(1.0, 1.0, 3.0, outcome, 4, 2, times)


def drawn(*renderables: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(*renderables)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_row_shows_the_memory_of_its_worker() -> None:
    alone, merged = snapshot_of(ALONE), snapshot_of(MERGED)
    assert [worker.kv_used_bytes for worker in alone.workers] == [8 * MIB, 4 * MIB]
    assert [worker.kv_used_bytes for worker in merged.workers] == [12 * MIB, 16 * MIB]
    assert [worker.kv_free_bytes for worker in merged.workers] == [4 * MIB, 0]
    assert (alone.merged, merged.merged) == (False, True)
    assert merged.preemptions == 4


def test_the_screen_shows_shrinking_parameters_and_growing_kv() -> None:
    scores = [Score("recompute", 3), Score("drop", 3)]
    scores[1].note(snapshot_of(ALONE), [])
    before = drawn(screen("PACED", FloodProgress(1.0, 3, 2, 0), snapshot_of(ALONE), scores))
    records = [record(0.5), record(1.5), record(0, RequestOutcome.FAILED)]
    scores[1].note(snapshot_of(MERGED), records, 2.0)
    after = drawn(screen("PACED", FloodProgress(2.0, 3, 0, 3), snapshot_of(MERGED), scores))
    bars = [
        next(line for line in text.splitlines() if line.startswith("a "))
        for text in (before, after)
    ]
    cells = 100 - 10 - 36
    assert bars[0].count("█") == round(cells * 18 / 26)
    assert bars[1].count("█") == round(cells * 10 / 26)
    assert bars[0].count("▓") < bars[1].count("▓")
    assert "KV 8.0 MiB of 8.0 MiB" in bars[0] and "10.0 MiB + KV 12.0 MiB of 16.0 MiB" in bars[1]
    assert "a (all layers)  |  b (all layers)" in before and "none yet" in before
    assert "3 of 3 sent: 2 running, 1 waiting for memory, 0 completed" in before
    assert "merged: a (layers 0-7) → b (layers 8-15)" in after
    assert "2 s: 2 groups merge into 1" in after
    assert "merge a, b (overload): demand 2,900 + 400 forecast > 2,048 tokens of KV" in after
    assert "2 of 3" in after and "1.50 s" in after and "failed" in after and "PACED" in after
    assert "4,096" in after, "the room for tokens in KV"


def test_the_screen_fits_a_small_terminal() -> None:
    scores = [Score("recompute", 56), Score("drop", 56)]
    for score in scores:
        score.note(snapshot_of(ALONE), [record(0.5), record(0, RequestOutcome.FAILED)])
        score.note(snapshot_of(MERGED), [record(0.5), record(0, RequestOutcome.FAILED)], 100.0)
    names = {"a": "worker-0", "b": "worker-1"}
    status = json.loads(json.dumps(MERGED))
    for row, worker_id in zip(status["workers"], names.values(), strict=True):
        row["id"] = worker_id
    status["groups"][0]["members"] = list(names.values())
    status["decisions"][0]["group_ids"] = ["group-worker-0", "group-worker-1"]
    text = drawn(
        screen(TITLE, FloodProgress(99.0, 56, 22, 33), snapshot_of(status), scores), width=80
    )
    lines = text.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert sum(line.startswith("worker-") for line in lines) == 2, "a bar is one line"


def test_the_conclusion_follows_the_figures() -> None:
    slow = Score("recompute", 1, ttft_p50_s=4.0, ttft_p99_s=6.0)
    fast = Score("drop", 1, ttft_p50_s=1.0, ttft_p99_s=1.5)
    text = conclusion([slow, fast])
    assert "with drop, compared with recompute" in text
    assert "the median is 4.0 times shorter, the p99 4.0 times shorter" in text
    fast.ttft_p99_s, slow.ttft_p99_s = 6.0, 1.5
    assert "the median is 4.0 times shorter, the p99 4.0 times longer" in conclusion([slow, fast])
    fast.ttft_p99_s = 1.6
    assert "the p99 about the same" in conclusion([slow, fast])
    assert "no comparison" in conclusion([slow, Score("drop", 1)])


def test_merges_are_counted_once() -> None:
    score = Score("drop", 1)
    for status in (
        ALONE,
        MERGED,
        MERGED,
        ALONE,
        MERGED | {"groups": [group(5, a=(0, 8), b=(8, 16))]},
    ):
        score.note(snapshot_of(status), [])
    assert score.merges == 2
    changes = ["2 groups merge into 1", "1 group split into 2", "2 groups merge into 1"]
    assert score.changes == [f"0 s: {change}" for change in changes]
    assert outcome(score).startswith("drop: 0 of 1 completed; 0 s: 2 groups merge into 1; ")
    assert "–" in drawn(scores_table([score]))


@pytest.mark.parametrize(
    ("parts", "whole", "cells"),
    [
        ((18, 8, 0), 26, [7, 3, 0, 0]),
        ((10, 0, 0), 20, [5, 0, 0, 5]),
        ((10, 10, 20), 20, [2, 3, 5, 0]),
        ((0, 0, 0), 0, [0, 0, 0, 10]),
    ],
)
def test_a_bar_has_a_fixed_length(parts: tuple[int, ...], whole: int, cells: list[int]) -> None:
    drawn = bar_cells(parts, whole, 10)
    assert drawn == cells and sum(drawn) == 10


def test_a_status_without_workers_is_shown_too() -> None:
    empty = snapshot_of(
        {"workers": [{"id": "a", "preemptions_total": 0, "running": 0}], "groups": []}
    )
    assert empty == ClusterSnapshot()
    line = plain_line(FloodProgress(0.0, 1, 0, 0), empty, Score("drop", 2))
    assert "1 of 2 sent: 0 running, 1 waiting for memory, 0 completed" in line


def test_the_flood_fits_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = write_tiny_model(tmp_path / "model", tmp_path, DEEP)
    check_model_folder(folder, "dummy")
    assert json.loads((folder / "config.json").read_text()) == {**CONFIG, **DEEP}
    requests = requests_of_flood()
    assert requests == requests_of_flood() and len(requests) > 40
    assert all(max(request.prompt_ids) < VOCABULARY for request in requests)
