"""`gpu_engine.py` and `gpu_sampling.py` measure every step, here of a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.cluster import REPOSITORY

OPTIONS = ("--device", "cpu", "--size", "tiny", "--memory-gib", "0.1")


def measure(module: str, figures_path: Path, *options: str) -> Any:
    command = [sys.executable, "-m", module, str(figures_path), *OPTIONS, *options]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=280)
    return json.loads(figures_path.read_text())


def test_iterations_interruptions_and_a_drop_are_measured(tmp_path: Path) -> None:
    figures = measure("benchmarks.gpu_engine", tmp_path / "figures.json")
    assert len(figures["iterations"]) == 6, "256 decodes do not fit in so little memory"
    for times in figures["iterations"].values():
        assert all(each["requests"] and each["new_tokens"] for each in times["lengths"])
        assert times["engine_ms"] > 0 and times["products_ms"] > 0
    assert figures["interrupted"]["interruptible_ms"] > 0
    drop = figures["drop"]
    assert drop["pause_us"] > 0 and drop["dropped_bytes"] > 0
    assert drop["tokens_after"] > drop["tokens_before"]


def test_sampling_is_measured_and_compared_with_the_host(tmp_path: Path) -> None:
    options = ("--rows", "1", "--repeats", "1")
    figures = measure("benchmarks.gpu_sampling", tmp_path / "figures.json", *options)
    assert figures["equality"] == [{"vocabulary": 1000, "rows": 4, "differ": 0, "first": []}]
    assert all(times["until_tokens_ms"] > 0 for times in figures["sampler"].values())
    assert len(figures["decode"]) == 7 and all(times > 0 for times in figures["decode"].values())
