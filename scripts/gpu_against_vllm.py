"""Compare the engine with vLLM on a GPU: the same requests, and the times between their tokens.

    python scripts/gpu_against_vllm.py FOLDER [--vllm-python PYTHON] [--vllm-site PACKAGES]

Both have the layers of Qwen2.5-7B with random weights in bfloat16, and no server. vLLM is imported
by PYTHON (default: this one) from its own packages or the folder PACKAGES. FOLDER/figures.json has
all figures; the table printed last has vLLM's times over ours. `--dry` runs tiny sizes on CPUs.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_steps.minutes import GpuStep, Minutes

OURS, VLLM = "tideserve", "vllm"
DEADLINES_S = {OURS: 150.0, VLLM: 300.0}
"""vLLM compiles and captures for a minute or more at its start."""


def main() -> None:
    """Run both engines; exit with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--vllm-site", help="folder of packages with vLLM")
    parser.add_argument("--seconds", type=float, default=460.0, help="time of both")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on CPUs")
    chosen = parser.parse_args()
    minutes = Minutes(chosen.folder, None, chosen.seconds, dry=chosen.dry)
    steps = (
        GpuStep(OURS, "engine_loop", DEADLINES_S[OURS]),
        GpuStep(
            VLLM,
            "vllm_loop",
            DEADLINES_S[VLLM],
            python=chosen.vllm_python,
            # Packages of this environment could shadow those of another interpreter.
            site=chosen.vllm_site or ("" if chosen.vllm_python else None),
        ),
    )
    failed = [step.name for step in steps if not minutes.run(step)]
    figures = {name: result.get("figures", {}) for name, result in minutes.results.items()}
    print("\n".join(compared(figures[OURS], figures[VLLM])))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def compared(ours: Mapping[str, Any], vllm: Mapping[str, Any]) -> list[str]:
    """A line for each case of ours: both times between tokens, and vLLM's over ours."""
    lines = [f"{'ms between tokens':24}{OURS:>12}{VLLM:>12}{'ratio':>8}"]
    for case, figures in ours.items():
        if not isinstance(figures, Mapping) or "interval_p50_ms" not in figures:
            continue
        own_ms = figures["interval_p50_ms"]
        other_ms = vllm.get(case, {}).get("interval_p50_ms")
        known = other_ms is not None and own_ms > 0
        other = f"{other_ms:12.2f}{other_ms / own_ms:8.2f}" if known else f"{'–':>12}"
        lines.append(f"{case:24}{own_ms:12.2f}{other}")
    return lines


if __name__ == "__main__":
    main()
