import os
import subprocess
import sys
from pathlib import Path

import pytest

from tideserve.cli.cache import FOLDER, NOT_WRITTEN, PREFIX, TAG_NAME, keep_bytecode

CHILD = "import module; print(module.__spec__.cached)"
PARENT = f"""
import subprocess, sys
from tideserve.cli.cache import keep_bytecode

keep_bytecode("module")
{CHILD}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def bytecode(folder: Path, **settings: str) -> Path:
    """The location of the bytecode of a module in `folder`, for a process and its child."""
    (folder / "module.py").write_text("A = 1\n")
    environment = {k: v for k, v in os.environ.items() if k not in (NOT_WRITTEN, PREFIX)}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "TIDESERVE_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-c", PARENT]
    output = subprocess.check_output(command, env=environment | settings, text=True)
    of_process, of_child = output.splitlines()
    assert of_process == of_child
    return Path(of_process)


def test_bytecode_not_stored_beside_the_sources_is_cached(tmp_path: Path) -> None:
    kept = bytecode(tmp_path, **{NOT_WRITTEN: "1"})
    folder = tmp_path / "cache" / FOLDER
    assert kept.is_relative_to(folder)
    assert kept.is_file()
    assert not (tmp_path / "__pycache__").exists()
    assert (tmp_path / "cache" / TAG_NAME).is_file()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert bytecode(tmp_path, **{NOT_WRITTEN: "1"}) == kept


def test_bytecode_of_a_read_only_tree_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "not_imported.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "sources")
    monkeypatch.setenv("TIDESERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(PREFIX, "")  # as if unset, and what is set is taken back
    monkeypatch.delenv(NOT_WRITTEN, raising=False)
    for name, value in (("dont_write_bytecode", False), ("pycache_prefix", None)):
        monkeypatch.setattr(sys, name, value)
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "sources")
    keep_bytecode("not_imported")
    assert sys.pycache_prefix == os.environ[PREFIX] == str(tmp_path / "cache" / FOLDER)


def test_a_chosen_folder_is_used(tmp_path: Path) -> None:
    kept = bytecode(tmp_path, **{NOT_WRITTEN: "1", PREFIX: str(tmp_path / "chosen")})
    assert kept.is_relative_to(tmp_path / "chosen")
    assert kept.is_file()
    assert not (tmp_path / "cache").exists()


def test_existing_bytecode_is_used(tmp_path: Path) -> None:
    """Whether or not the folder is writable."""
    kept = bytecode(tmp_path)
    assert kept.parent == tmp_path / "__pycache__"
    assert bytecode(tmp_path, **{NOT_WRITTEN: "1"}) == kept
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / FOLDER
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    assert not bytecode(tmp_path, **{NOT_WRITTEN: "1"}).exists()
    assert not list(folder.iterdir())


def test_nothing_changes_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert not bytecode(tmp_path, **{NOT_WRITTEN: "1"}).exists()
