import os
import subprocess
import sys
from pathlib import Path

from tideserve.cli.bytecode import NOT_WRITTEN, PREFIX, with_bytecode


def test_bytecode_that_is_kept_stays_where_it_is(tmp_path: Path) -> None:
    kept = tmp_path / "module.pyc"
    kept.touch()
    environment = {"A": "b", NOT_WRITTEN: "1"}
    assert with_bytecode(environment, str(kept)) == environment
    assert with_bytecode(environment, None) == environment


def test_a_folder_that_was_chosen_is_used(tmp_path: Path) -> None:
    environment = with_bytecode({PREFIX: "/chosen", NOT_WRITTEN: "1"}, str(tmp_path / "none"))
    assert environment == {PREFIX: "/chosen"}


def test_what_a_service_compiles_is_compiled_once(tmp_path: Path) -> None:
    """Nothing is written beside the sources, and the next process finds it in the cache."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "module.py").write_text("A = 1\n")
    asking = [sys.executable, "-c", "import module; print(module.__spec__.cached)"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "sources"), NOT_WRITTEN: "1"}
    environment |= {"TIDESERVE_CACHE": str(tmp_path / "cache")}
    environment.pop(PREFIX, None)
    missed = subprocess.run(asking, env=environment, capture_output=True, text=True, check=True)
    environment = with_bytecode(environment, missed.stdout.strip())
    found = subprocess.run(asking, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "cache")
    assert Path(found.stdout.strip()).is_file()
    assert not (tmp_path / "sources" / "__pycache__").exists()
