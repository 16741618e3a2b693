"""Every query of every board has numbers after a flood, asked from a real Prometheus."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE = 77
TIMEOUT_S = 1200


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_every_query_of_every_board_has_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/boards_check.py", "--fetch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 without a number" in done.stdout
