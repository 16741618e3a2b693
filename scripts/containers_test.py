"""`make containers-test`: build the images, start a cluster of containers, and disturb it.

Writes build/containers-test.json: {"checks": [{"name", "ok", "seconds"}], "images": {name: bytes}}.
Exit code 77 and a message if there is no container engine; see scripts/container_engine.sh.
`--quick` only builds, starts, chats and stops.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from container_cluster import ROOT, Containers, say

ENGINE = ROOT / "scripts" / "container_engine.sh"
RESULTS = ROOT / "build" / "containers-test.json"
ENGINE_TIMEOUT_S = 600.0
NO_ENGINE = 77
INTERRUPTED = 130
# Memory for the parameters in float32 and about 1,500 tokens of KV cache.
SETTINGS = {"DTYPE": "float32", "MEMORY": "620MiB", "WORKER_MEMORY_LIMIT": "3G"}
EXPORT = re.compile(r"([A-Z_]+)=(\S*)")


class NoEngine(Exception):
    """No container engine is available; the script has printed the cause."""


@contextmanager
def engine() -> Iterator[None]:
    """A running engine. A private engine is started if allowed, and stopped on exit."""
    shown = _engine("start")
    started = dict(EXPORT.findall(shown))
    os.environ.update(started)
    try:
        _engine("base")
        yield
    finally:
        if started:
            _engine("stop")


def _engine(verb: str) -> str:
    done = subprocess.run(
        [ENGINE, verb], stdout=subprocess.PIPE, text=True, timeout=ENGINE_TIMEOUT_S, check=False
    )
    if done.returncode == NO_ENGINE:
        raise NoEngine
    if done.returncode:
        raise AssertionError(f"container_engine.sh {verb} ended with {done.returncode}")
    return done.stdout


class Report:
    """Runs checks sequentially and records the outcomes."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []
        self.images: dict[str, int] = {}

    def check(self, name: str, work: Callable[[], Any]) -> bool:
        """Run a check and print the outcome; returns whether it passed."""
        started_s = time.monotonic()
        say(f"==> {name}")
        error = ""
        try:
            work()
        # Catch every error, so that the other checks run and the containers are removed.
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt | SystemExit):
                raise
            error = "; ".join(_sentences(failure))
        seconds = round(time.monotonic() - started_s, 1)
        self.checks.append({"name": name, "ok": not error, "seconds": seconds})
        say(f"    FAILED in {seconds} s: {error}" if error else f"    passed in {seconds} s")
        return not error

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check["ok"] for check in self.checks)

    def write(self) -> None:
        """Write the results as JSON, and print a summary."""
        RESULTS.parent.mkdir(exist_ok=True)
        content = {"checks": self.checks, "images": self.images}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        for name, size in self.images.items():
            say(f"{name}: {size / 1e6:.0f} MB")
        failed = sum(not check["ok"] for check in self.checks)
        print(f"containers: {len(self.checks) - failed} passed, {failed} failed", flush=True)


def _sentences(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [text for nested in error.exceptions for text in _sentences(nested)]
    return [f"{type(error).__name__}: {error}"]


def run_checks(report: Report, names: list[str]) -> None:
    """Build the images, start the cluster, run the checks and remove the cluster."""
    from container_checks import CHECKS

    cluster = Containers(**SETTINGS)
    try:
        if not report.check("build", cluster.build) or not report.check("up", cluster.up):
            return
        report.images = cluster.images()
        for name in names:
            report.check(name, partial(asyncio.run, CHECKS[name](cluster)))
    finally:
        cluster.down()


def main() -> int:
    """Returns 0 if all checks passed, 1 if not, 77 without an engine, 130 if interrupted."""
    from container_checks import CHECKS, QUICK

    parser = argparse.ArgumentParser(description="Test the cluster of containers.")
    parser.add_argument("--quick", action="store_true", help="only start, chat and stop")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="only these checks")
    arguments = parser.parse_args()
    # Remove the containers and stop the engine even on SIGTERM or an interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report()
    try:
        with engine():
            run_checks(report, arguments.only or list(QUICK if arguments.quick else CHECKS))
    except NoEngine:
        return NO_ENGINE
    except KeyboardInterrupt:
        return INTERRUPTED
    report.write()
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
