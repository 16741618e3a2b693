"""`benchmarks/gpu_engine.py` measures all steps, here with a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.cluster import REPOSITORY


def test_iterations_interruptions_and_a_drop_are_measured(tmp_path: Path) -> None:
    figures_path = tmp_path / "figures.json"
    options = ("--device", "cpu", "--size", "tiny", "--memory-gib", "0.1")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_engine", str(figures_path), *options],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=280,
    )
    figures = json.loads(figures_path.read_text())
    assert len(figures["iterations"]) == 6, "256 decodes do not fit in so little memory"
    for times in figures["iterations"].values():
        assert all(each["requests"] and each["new_tokens"] for each in times["lengths"])
        assert times["engine_ms"] > 0 and times["products_ms"] > 0
    assert figures["interrupted"]["interruptible_ms"] > 0
    drop = figures["drop"]
    assert drop["pause_us"] > 0 and drop["dropped_bytes"] > 0
    assert drop["tokens_after"] > drop["tokens_before"]
