"""`benchmarks/gpu_copies.py` measures all kinds of copies, here with a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_all_steps_run_on_a_cpu(tmp_path: Path) -> None:
    figures_path = tmp_path / "figures.json"
    options = ["--device", "cpu", "--size", "tiny", "--memory-gib", "0.1", "--seconds", "0.1"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_copies", str(figures_path), *options],
        cwd=REPOSITORY,
        check=True,
        timeout=120,
    )
    figures = json.loads(figures_path.read_text())
    for name in ("pack_kv", "unpack_kv", "pack_slab"):
        assert figures[name]["failure"] == ""
        assert figures[name]["idle_gib_per_s"] > 0 and figures[name]["beside_gib_per_s"] > 0
