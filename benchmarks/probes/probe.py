"""Programs that measure a part of tideserve in a separate process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import python_environment

TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A module that prints its measurements as a JSON object, and its arguments."""

    part: str
    title: str
    module: str
    arguments: tuple[str, ...]
    timeout_s: float = TIMEOUT_S


def run_probe(probe: Probe) -> Any:
    """The JSON output of a probe. Raises SystemUnavailable with its last line of stderr."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", probe.module, *probe.arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=probe.timeout_s,
            env=python_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemUnavailable(f"{probe.title} took more than {probe.timeout_s:.0f} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no output on stderr"]
        raise SystemUnavailable(f"{probe.title} ended with {done.returncode}: {last[0]}")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise SystemUnavailable(f"{probe.title} printed no figures") from error
