"""Runs the steps of a script, each as a process with its own deadline.

FOLDER/figures.json is rewritten after every step, so that it is complete up to a step that is cut
off; FOLDER/log has the output of all steps.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder with the packages of this checkout."""
END_S = 8.0
"""Time that a step has to stop its cluster after its deadline."""
LOG_TAIL = 30
NUMBERS_SHOWN = 60


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A module of this package, its arguments, and the seconds after which it is ended.

    `serves`: it needs a tokenizer. `python`, `site`: another interpreter, and the packages that it
    imports instead of those of PYTHONPATH.
    """

    name: str
    module: str
    deadline_s: float
    arguments: tuple[str, ...] = ()
    serves: bool = False
    python: str | None = None
    site: str | None = None


class Minutes:
    """Runs steps within a budget of seconds, and collects their figures."""

    def __init__(self, folder: Path, tokenizer: Path | None, seconds: float, *, dry: bool) -> None:
        """`folder` is created; `tokenizer` is for the steps that serve."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tokenizer = tokenizer and tokenizer.resolve()
        self._dry = dry
        self._ends_s = time.monotonic() + seconds
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, step: GpuStep) -> bool:
        """Run a step, at most until the budget ends; returns whether it succeeded."""
        part = self._folder / f"{step.name}.json"
        part.unlink(missing_ok=True)
        began_s = time.monotonic()
        allowed_s = min(step.deadline_s, self._ends_s - began_s - END_S)
        result: dict[str, Any] = {"ended": "no time left"}
        self.results[step.name] = result
        if allowed_s > 0:
            print(f"{step.name}: at most {allowed_s:.0f} s", flush=True)
            log_path = self._folder / "log"
            with log_path.open("ab") as log:
                log.write(f"\n===== {step.name}\n".encode())
                log.flush()
                start = log.tell()
                result["ended"] = self._child(step, part, log, allowed_s)
            result["took_s"] = round(time.monotonic() - began_s, 1)
            result["figures"] = json.loads(part.read_text()) if part.exists() else {}
            if result["ended"] != 0:
                tail = log_path.read_bytes()[start:].decode("utf-8", "replace").splitlines()
                result["log"] = tail[-LOG_TAIL:]
                print("\n".join(result["log"]), flush=True)
            part.unlink(missing_ok=True)
        self._write()
        return result["ended"] == 0

    def _child(self, step: GpuStep, part: Path, log: Any, allowed_s: float) -> int | str:
        """Run the step's process; returns its exit status, or a note that its time was up."""
        python = step.python or sys.executable
        command = [python, "-m", f"{__package__}.{step.module}", str(part), *step.arguments]
        if step.serves and self._tokenizer is not None:
            command += ["--tokenizer", str(self._tokenizer)]
        if self._dry:
            command.append("--dry")
        # Kernels of a dry run are interpreted.
        interpreted = {"TRITON_INTERPRET": "1"} if self._dry else {}
        inherited = os.environ.get("PYTHONPATH") if step.site is None else step.site
        paths = [str(PACKAGES), *filter(None, [inherited])]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **interpreted,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONUNBUFFERED": "1",
            },
            start_new_session=True,
        )
        try:
            return child.wait(allowed_s)
        except subprocess.TimeoutExpired:
            # An interrupt lets a step stop its cluster, whose processes have their own sessions.
            child.send_signal(signal.SIGINT)
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            return f"cut off after {allowed_s:.0f} s"

    def _write(self) -> None:
        # A lease may end while the file is written.
        written = self._folder / "figures.json.part"
        written.write_text(json.dumps({"dry": self._dry, "steps": self.results}, indent=1))
        written.replace(self._folder / "figures.json")

    def table(self) -> str:
        """A table of the steps' outcomes and numbers."""
        lines = []
        for name, result in self.results.items():
            lines.append(f"{name:16} {result['ended']!s:>20} {result.get('took_s', 0):7.1f} s")
            numbers = list(numbers_of(result.get("figures", {})))
            lines += [f"    {path:48} {value:>16}" for path, value in numbers[:NUMBERS_SHOWN]]
        return "\n".join(lines)


LEFT_OUT = ("took_s", "worker_logs", "capacity", "moved", "packages")
"""Figures that the table leaves out."""


def numbers_of(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The path and text of each number and short text."""
    for name, value in figures.items():
        path = f"{prefix}{name}"
        if any(part in name for part in LEFT_OUT):
            continue
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{path}.")
        elif isinstance(value, float):
            yield path, f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        elif isinstance(value, int | str):
            yield path, str(value)
        elif isinstance(value, Sequence):
            yield path, " ".join(map(str, value))
