"""The demo's view from recorded states, and its arithmetic."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.record import Outcome, RequestRecord
from cli.demo import requests_of_flood
from cli.demo_model import CONFIG, VOCABULARY, write_demo_model
from cli.demo_state import Score, Snapshot, snapshot_of
from cli.demo_view import bar_cells, plain_line, scores_table, screen
from cli.model_folder import check_model_folder

MIB = 1 << 20
SHAPE = {"num_layers": 16, "kv_bytes": 512}


def worker(name: str, parameters: int, total: int, free: int) -> dict[str, Any]:
    """A worker's row in the status; parameters in MiB, blocks."""
    return {
        "id": name,
        "parameter_bytes": parameters * MIB,
        "kv_blocks_total": total,
        "kv_blocks_free": free,
        "preemptions_total": 2,
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
    "workers": [worker("a", 18, 64, 0), worker("b", 18, 64, 32)],
    "groups": [group(1, a=(0, 16)), group(1, b=(0, 16))],
    "decisions": [],
}
MERGED = {
    "workers": [worker("a", 10, 256, 64), worker("b", 10, 256, 0)],
    "groups": [group(2, a=(0, 8), b=(8, 16))],
    "decisions": [
        {
            "action": "merge",
            "cause": "overload",
            "group_ids": ["a", "b"],
            "needed_tokens": 900,
            "demand_tokens": 2900,
            "threshold_tokens": 2048,
        }
    ],
}


def record(ttft_s: float, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    times = (1.0 + ttft_s, 3.0) if outcome is Outcome.COMPLETED else ()
    return RequestRecord(1.0, 1.0, 3.0, outcome, 4, 2, times)


def drawn(*renderables: Any) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(*renderables)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_memory_of_a_worker_depends_on_the_layers_that_it_runs() -> None:
    alone, merged = snapshot_of(ALONE), snapshot_of(MERGED)
    assert [one.kv_used_bytes for one in alone.workers] == [8 * MIB, 4 * MIB]
    assert [one.kv_used_bytes for one in merged.workers] == [12 * MIB, 16 * MIB]
    assert [one.kv_free_bytes for one in merged.workers] == [4 * MIB, 0]
    assert (alone.merged, merged.merged) == (False, True)
    assert merged.preemptions == 4


def test_parameters_ebb_and_kv_rises_on_the_screen() -> None:
    scores = [Score("recompute", 3), Score("drop", 3)]
    before = drawn(screen("PACED", 1.0, snapshot_of(ALONE), scores))
    scores[1].note(snapshot_of(MERGED), [record(0.5), record(1.5), record(0, Outcome.FAILED)])
    after = drawn(screen("PACED", 2.0, snapshot_of(MERGED), scores))
    bars = [
        next(line for line in text.splitlines() if line.startswith("a "))
        for text in (before, after)
    ]
    assert bars[0].count("█") == round(48 * 18 / 26) and bars[1].count("█") == round(48 * 10 / 26)
    assert bars[0].count("▓") < bars[1].count("▓")
    assert "KV 8.0 MiB/8.0 MiB" in bars[0] and "10.0 MiB + KV 12.0 MiB/16.0 MiB" in bars[1]
    assert "a (all layers)  |  b (all layers)" in before and "nothing yet" in before
    assert "merged: a (layers 0-7) → b (layers 8-15)" in after
    assert "merge a, b (overload): demand 2,900 > 2,048 tokens of KV" in after
    assert "2 of 3" in after and "1.50 s" in after and "failed" in after and "PACED" in after
    assert len(after.splitlines()) < 24, "it must fit on a small terminal"


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
def test_a_bar_has_always_the_same_length(
    parts: tuple[int, ...], whole: int, cells: list[int]
) -> None:
    found = bar_cells(parts, whole, 10)
    assert found == cells and sum(found) == 10


def test_a_status_without_workers_is_shown_too() -> None:
    empty = snapshot_of({"workers": [{"id": "a", "preemptions_total": 0}], "groups": []})
    assert empty == Snapshot()
    assert "answered 0 of 2" in plain_line(0.0, empty, Score("drop", 2))


def test_the_flood_fits_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = write_demo_model(tmp_path / "model", tmp_path)
    check_model_folder(folder, "dummy")
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    requests = requests_of_flood()
    assert requests == requests_of_flood() and len(requests) > 40
    assert all(max(one.prompt_ids) < VOCABULARY for one in requests)
