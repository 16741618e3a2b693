"""Where the logs of a cluster that failed are kept, for whoever looks for the cause."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.systems.system import Say


def logs_folder(scenario: str, file: Path | None = None) -> Path:
    """The folder for them, which is not made: beside `file`, else a temporary one of this run."""
    if file is not None:
        return file.with_suffix(".logs")
    return Path(tempfile.gettempdir(), f"tideserve-{scenario}-{os.getpid()}.logs")


def keep_logs(folder: Path, logs: Path, target: Path) -> Path:
    """Copy `folder` to `target`, and `logs` of the processes into it; returns `target`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    shutil.copytree(logs, target / "logs")
    return target


def keep_if_failed(
    scenario: str, problems: Sequence[str], folder: Path, logs: Path, say: Say
) -> None:
    """Keep the logs of a trial in which something was wrong, and tell where."""
    if problems:
        say(f"logs: {keep_logs(folder, logs, logs_folder(scenario))}")
