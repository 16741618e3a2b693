"""Run all static checks, even if some fail, and list the failures at the end."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
CHECK_TIMEOUT_S = 600

CHECKS = {
    "lint (ruff check)": ["ruff", "check", "."],
    "formatting (ruff format)": ["ruff", "format", "--check", "."],
    "types (mypy)": ["mypy"],
    "import rules (lint-imports)": ["lint-imports"],
    "structure": ["python", "scripts/check_structure.py"],
    "contracts (buf lint)": ["buf", "lint"],
    "contracts against the last release (buf breaking)": [
        *("buf", "breaking", "--against", "proto/last_release.binpb"),
    ],
    "generated stubs": ["python", "scripts/gen_stubs.py", "--check"],
    "manifests (with the available tools)": [
        "python",
        "scripts/check_deploy.py",
        "--if-possible",
    ],
    "alert rules (if promtool is available)": [
        "python",
        "scripts/check_rules.py",
        "--if-possible",
    ],
    "texts": ["python", "scripts/check_texts.py"],
    "generated pages": ["python", "scripts/gen_docs.py", "--check"],
    "packages of the images": ["python", "scripts/image_requirements.py", "--check"],
    "compose files (if compose is available)": ["python", "scripts/check_compose.py"],
    "images (hadolint)": ["hadolint", "docker/Dockerfile", "docker/etcd.Dockerfile"],
}


def main() -> int:
    """Returns 1 if a check failed."""
    failed = []
    for name, (tool, *arguments) in CHECKS.items():
        print(f"==> {name}", flush=True)
        started_s = time.monotonic()
        command = [str(TOOLS / tool), *arguments]
        status = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=CHECK_TIMEOUT_S, check=False
        ).returncode
        print(f"    {'passed' if status == 0 else 'FAILED'}", end="")
        print(f" in {time.monotonic() - started_s:.1f} s", flush=True)
        if status != 0:
            failed.append(name)
    print(f"checks: {len(CHECKS) - len(failed)} passed, {len(failed)} failed", end="")
    print(f" ({'; '.join(failed)})" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
