"""Python programs that a test runs to their end."""

import subprocess
import sys
from collections.abc import Mapping


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
