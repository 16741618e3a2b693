import os
import subprocess
import sys
from pathlib import Path

import pytest

from tideserve.cli.bytecode import NOT_WRITTEN, PREFIX

CHILD = "import module; print(module.__spec__.cached)"
PARENT = f"""
import subprocess, sys
from tideserve.cli.bytecode import keep_bytecode

keep_bytecode(*sys.argv[1:])
{CHILD}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def bytecode(folder: Path, settings: dict[str, str], *arguments: str) -> list[Path]:
    """Where a process and its child keep the bytecode of a module of `folder`."""
    (folder / "module.py").write_text("A = 1\n")
    environment = {k: v for k, v in os.environ.items() if k not in (NOT_WRITTEN, PREFIX)}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "TIDESERVE_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-c", PARENT, *arguments]
    output = subprocess.check_output(command, env=environment | settings, text=True)
    return [Path(line) for line in output.splitlines()]


@pytest.mark.parametrize("unwritable", [False, True])
def test_what_may_not_be_written_beside_the_sources_is_in_the_cache(
    unwritable: bool, tmp_path: Path
) -> None:
    found = (
        bytecode(tmp_path, {}, "/proc/sys")
        if unwritable
        else bytecode(tmp_path, {NOT_WRITTEN: "1"})
    )
    kept = found[0]
    assert found == [kept, kept]
    assert kept.is_relative_to(tmp_path / "cache")
    assert kept.is_file()
    assert not (tmp_path / "__pycache__").exists()


def test_a_chosen_folder_is_used(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    found = bytecode(tmp_path, {NOT_WRITTEN: "1", PREFIX: str(chosen)})
    assert all(one.is_relative_to(chosen) and one.is_file() for one in found)
    assert not (tmp_path / "cache").exists()


def test_bytecode_stays_beside_sources_where_it_may(tmp_path: Path) -> None:
    found = bytecode(tmp_path, {}, str(tmp_path))
    assert {one.parent for one in found} == {tmp_path / "__pycache__"}
    assert not (tmp_path / "cache").exists()
