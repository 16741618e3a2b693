"""Measure as much as possible in a few minutes on a GPU: steps of `benchmarks.gpu_steps` in turn.

    python scripts/gpu_minutes.py FOLDER [--tokenizer MODEL] [--seconds 255] [--only STEP ...]

Each step is a process with its own deadline. FOLDER/figures.json is rewritten after every step, so
that it is complete up to a step that is cut off; FOLDER/log has the output of all steps. A table is
printed last. `--dry` runs every step on CPUs with tiny sizes, without the parts that need a driver.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_steps.minutes import GpuStep, Minutes

STEPS = (
    GpuStep("environment", "environment", 45),
    GpuStep("cluster", "cluster", 150, serves=True),
    GpuStep("chunks", "chunks", 40),
    GpuStep("engine", "engine", 90),
    GpuStep("sampling", "sampling", 100),
    GpuStep("cluster-exact", "cluster", 70, ("--exact",), serves=True),
    GpuStep("loop", "engine_loop", 120),
    GpuStep("kernels", "kernels", 70),
)
"""The most valuable first; `--only` chooses those of a later run."""


def main() -> None:
    """Run the steps; exit with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer")
    parser.add_argument("--seconds", type=float, default=255.0, help="time of all steps")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on CPUs")
    chosen = parser.parse_args()
    minutes = Minutes(chosen.folder, chosen.tokenizer, chosen.seconds, dry=chosen.dry)
    failed = [
        step.name
        for step in STEPS
        if (not chosen.only or step.name in chosen.only) and not minutes.run(step)
    ]
    print(minutes.table())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
