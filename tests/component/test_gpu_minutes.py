"""`scripts/gpu_minutes.py` runs all steps, here without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.cluster import REPOSITORY

TIMEOUT_S = 280


def rehearse(folder: Path, *steps: str) -> dict[str, Any]:
    """Run `steps`, which must succeed; returns the steps in the file of figures."""
    command = [sys.executable, "scripts/gpu_minutes.py", str(folder), "--dry"]
    command += ["--seconds", str(TIMEOUT_S), "--only", *steps]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((folder / "figures.json").read_text())["steps"]
    assert list(results) == list(steps)
    return results


def test_a_process_imports_chunks_and_an_engine_is_measured(tmp_path: Path) -> None:
    results = rehearse(tmp_path, "environment", "chunks", "engine", "loop", "kernels")
    assert "tcp/lo" in results["environment"]["figures"]["ucx"]["transports"]
    chunks = results["chunks"]["figures"]
    assert chunks["remapped"] == {"view": [22, 22], "alias": [11, 11]}
    assert chunks["owner_killed"]["chunk_bytes_in_all"] == 16 << 16
    engine = results["engine"]["figures"]
    assert engine["decode_ms"]["qwen_default"]["p50"] > 0
    assert not engine["copies"]["pack"]["failure"] and not engine["copies"]["unpack"]["failure"]
    assert engine["capture_ms"]["drop"]["dropped_bytes"] > 0
    for case in ("1 greedy", "1 qwen_default"):
        assert 0 < results["loop"]["figures"][case]["interval_p50_ms"] < 1000
    prefill = results["kernels"]["figures"]["prefill 32"]
    assert prefill["kernels_us"] > 0 and prefill["kernels"]


def test_sampling_is_measured_and_compared_with_the_host(tmp_path: Path) -> None:
    figures = rehearse(tmp_path, "sampling")["sampling"]["figures"]
    assert figures["equality_1000"] == {"rows": 4, "differ": 0, "first": []}
    assert len(figures["sampler_ms"]) == 8
    assert all(times["until_tokens"] > 0 for times in figures["sampler_ms"].values())
    assert len(figures["decode_ms"]) == 7 and min(figures["decode_ms"].values()) > 0


def test_two_workers_merge_split_and_lose_a_member(tmp_path: Path) -> None:
    figures = rehearse(tmp_path, "cluster")["cluster"]["figures"]
    assert [figures[part]["groups"] for part in ("merged", "split", "merged_again")] == [1, 2, 1]
    for part in ("repeated", "merged", "split", "merged_again", "killed"):
        assert figures[part]["by_length"] == {"completed": 4}
        assert figures[part]["compared"] == {"completed": 4}
    assert figures["killed"]["alone_after_s"] is not None and figures["killed"]["whole_again"]
