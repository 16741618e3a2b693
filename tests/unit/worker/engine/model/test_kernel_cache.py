"""Location of compiled kernels, and their separation by processor."""

import os
from pathlib import Path

import pytest

from services.worker.engine.model.cpu_kernels.compiler import CACHE_VARIABLE, cache_folder
from tests.support.python import run_python

REPOSITORY = Path(__file__).resolve().parents[5]
# Compiles kernels, runs one, and prints whether those of a module were in the cache.
PROGRAM = """
import numpy
from services.worker.engine.model.cpu_kernels import STORED_TYPES, rms_norm
from services.worker.engine.model.cpu_kernels.compiler import compiled

double = compiled("float32(float32)")(lambda number: number + number)
assert double(21.0) == 42.0
kernels = [value for value in vars(rms_norm).values() if hasattr(value, "stats")]
assert kernels
for kernel in kernels:
    kernel.load(*STORED_TYPES)
print(all(kernel.stats.cache_hits for kernel in kernels))
"""


def sources_in(folder: Path) -> Path:
    (folder / "kernel.py").write_text("one")
    (folder / "helper.py").write_text("two")
    return folder


def test_changed_sources_have_another_cache(tmp_path: Path) -> None:
    sources = sources_in(tmp_path)
    before = cache_folder(sources, {})
    assert cache_folder(sources, {}) == before
    (sources / "helper.py").write_text("three")
    assert cache_folder(sources, {}) != before


def test_a_chosen_folder_starts_with_the_packaged_kernels(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    seed = cache_folder(sources_in(sources), {})
    seed.mkdir(parents=True)
    (seed / "kernel.nbi").write_text("compiled")
    environment = {CACHE_VARIABLE: str(tmp_path / "deep" / "chosen")}
    folder = cache_folder(sources, environment)
    assert folder.parent == tmp_path / "deep" / "chosen"
    assert (folder / "kernel.nbi").read_text() == "compiled"
    (folder / "kernel.nbi").write_text("newer")
    assert cache_folder(sources, environment) == folder
    assert (folder / "kernel.nbi").read_text() == "newer"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, inner: bool
) -> None:
    sources = sources_in(tmp_path)
    environment = {CACHE_VARIABLE: str(tmp_path / "chosen")}
    folder = cache_folder(sources, environment)
    assert folder.parent == tmp_path / "chosen"
    (folder if inner else folder.parent).chmod(mode)
    assert cache_folder(sources, environment) == cache_folder(sources, {})
    assert f"its mode {mode:o} lets others write; set {CACHE_VARIABLE} to a folder" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a folder")
def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = sources_in(tmp_path)
    environment = {CACHE_VARIABLE: str(tmp_path / "chosen")}
    os.chown(cache_folder(sources, environment), 65532, 65532)
    assert cache_folder(sources, environment) == cache_folder(sources, {})
    assert "it belongs to user 65532" in caplog.text


def test_a_new_folder_is_reusable_with_any_umask(tmp_path: Path) -> None:
    sources = sources_in(tmp_path)
    environment = {CACHE_VARIABLE: str(tmp_path / "chosen")}
    before = os.umask(0)
    try:
        folder = cache_folder(sources, environment)
    finally:
        os.umask(before)
    assert cache_folder(sources, environment) == folder
    assert folder.parent == tmp_path / "chosen"


def test_copy_errors_are_ignored(tmp_path: Path) -> None:
    sources = sources_in(tmp_path)
    cache_folder(sources, {}).mkdir(parents=True)
    taken = tmp_path / "taken"
    taken.write_text("a file where the folder would be")
    folder = cache_folder(sources, {CACHE_VARIABLE: str(taken)})
    assert folder.parent == taken


def runs(cache: Path, **environment: str) -> bool:
    """Run the program with this cache; returns whether its kernels were cached."""
    own = {"PYTHONPATH": str(REPOSITORY), CACHE_VARIABLE: str(cache)}
    done = run_python("-c", PROGRAM, env={**os.environ, **own, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


def test_another_processor_adds_its_own_kernels(tmp_path: Path) -> None:
    runs(tmp_path)  # From what lies beside the sources, if this processor has run them before.
    assert not runs(tmp_path, NUMBA_CPU_NAME="generic"), "kernels of another processor were taken"
    assert runs(tmp_path), "the first processor's are gone"
