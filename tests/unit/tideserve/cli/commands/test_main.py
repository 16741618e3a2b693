"""The command line as a whole: fast start, help, precise errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tideserve.cli.commands.main import app

HEAVY = ("grpc", "httpx", "torch", "transformers", "yaml", "psutil", "services")


def test_help_loads_nothing_heavy() -> None:
    loaded = f"[name for name in {HEAVY} if name in sys.modules]"
    code = f"import sys, tideserve.cli.commands.main; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_foreign_package_benchmarks_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('foreign')")
    command = [sys.executable, "-m", "tideserve.cli.commands.main", "bench", "tsunami"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "unknown scenario 'tsunami'" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("serve", "up", "status", "doctor", "plan", "drop", "restore", "chat", "logs", "version"),
        "engine",
    ],
)
def test_every_command_has_a_help_text(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_an_unknown_option_is_refused() -> None:
    result = CliRunner().invoke(app, ["up", "--memroy", "1GiB"])
    assert result.exit_code == 2
    assert "--memory" in result.output
    result = CliRunner().invoke(app, ["serve", "--tensor-parallel-size", "2"])
    assert result.exit_code == 2
    assert "docs/vllm-flags.md" in result.output
