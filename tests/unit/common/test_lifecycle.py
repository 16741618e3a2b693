"""How a service process ends: a sentence and an exit code for what people can mend."""

import subprocess
import sys
from pathlib import Path

from services.common.lifecycle import EXIT_UNUSABLE
from tideserve.bench.client_process import python_environment

PROGRAM = """
import asyncio
from dataclasses import dataclass
from services.common.errors import ConfigError
from services.common.lifecycle import main

@dataclass
class Config:
    pass

async def fail(error):
    raise error

async def serve(config, stop):
    async with asyncio.TaskGroup() as tasks:
        for error in [{errors}]:
            tasks.create_task(fail(error))

main("tide", Config, serve)
"""


def run(errors: str, folder: Path) -> subprocess.CompletedProcess[str]:
    config = folder / "config.yaml"
    config.write_text("{}")
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(errors=errors), "--config", str(config)],
        capture_output=True,
        text=True,
        env=python_environment(),
        timeout=60,
        check=False,
    )


def test_an_error_for_people_is_the_last_line(tmp_path: Path) -> None:
    done = run("ConfigError('no tide')", tmp_path)
    assert done.returncode == EXIT_UNUSABLE
    assert done.stderr == "tideserve-tide: no tide\n"


def test_it_is_told_beside_an_error_of_another_kind(tmp_path: Path) -> None:
    done = run("ConfigError('no tide'), ValueError('a fault')", tmp_path)
    assert done.returncode == 1
    assert "tideserve-tide: no tide\n" in done.stderr
    assert "ValueError: a fault" in done.stderr


def test_without_an_error_it_ends_well(tmp_path: Path) -> None:
    done = run("", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
