"""Validate the compose files in every combination with `docker compose`, which needs no engine.

If it is not installed, the script uses that of a private engine in the cache; without either it
reports so and passes.
"""

import os
import shutil
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tideserve.cli.cache import cache_root  # noqa: E402

MAIN = "compose.yaml"
OTHERS = (
    "compose.admin.yaml",
    "compose.gpu.yaml",
    "compose.keys.yaml",
    "compose.tls.yaml",
    "compose.upstream.yaml",
    "compose.observability.yaml",
    "docker/compose.test.yaml",
)
TIMEOUT_S = 60.0
# The compose file of the test needs these variables.
SETTINGS = {"TEST_SUBNET": "10.213.0.0/24"}


def find_compose() -> list[str] | None:
    """The command of compose; None if not installed."""
    plugins = cache_root() / "engine" / "unpacked" / "usr" / "libexec" / "docker" / "cli-plugins"
    for command in (["docker", "compose"], ["docker-compose"], [str(plugins / "docker-compose")]):
        if shutil.which(command[0]) and _answers([*command, "version"]):
            return command
    return None


def _answers(command: list[str]) -> bool:
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    return done.returncode == 0


def main() -> int:
    """Returns 1 if a combination is invalid."""
    compose = find_compose()
    if compose is None:
        print("docker compose is not installed: only the tests check the compose files")
        return 0
    wrong = 0
    every = chain.from_iterable(combinations(OTHERS, count) for count in range(len(OTHERS) + 1))
    for others in every:
        files = [word for name in (MAIN, *others) for word in ("--file", name)]
        done = subprocess.run(
            [*compose, *files, "config", "--quiet"],
            cwd=ROOT,
            env={**os.environ, **SETTINGS},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            wrong += 1
            print(f"{', '.join((MAIN, *others))}: {done.stderr.strip()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
