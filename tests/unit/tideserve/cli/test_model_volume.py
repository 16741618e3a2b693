"""The model of a cluster in containers is stored in a folder of its name."""

from pathlib import Path
from typing import Any

import pytest

from tideserve.cli import model_volume
from tideserve.cli.model_folder import ModelUnavailable
from tideserve.cli.model_store import DEFAULT_MODEL_NAME
from tideserve.cli.model_volume import main, place_model


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has every model."""
    asked: list[str] = []

    def download(hub_id: str, _report: Any, *, folder: Path) -> None:
        asked.append(hub_id)
        fill(folder)
        (folder / ".cache").mkdir()

    monkeypatch.setattr(model_volume, "download", download)
    return asked


def test_a_model_of_the_hub_is_downloaded_once(tmp_path: Path, downloads: list[str]) -> None:
    for _ in range(2):
        folder = place_model("team/model", tmp_path, print)
        assert folder == tmp_path / "team" / "model"
    assert downloads == ["team/model"]
    assert not (folder / ".cache").exists()


def test_a_download_that_fails_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(_hub_id: str, _report: Any, *, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelUnavailable("the hub cannot be reached")

    monkeypatch.setattr(model_volume, "download", download)
    assert main({"MODEL": "team/model", "MODELS": str(tmp_path)}) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert not (tmp_path / "team").exists()


def test_the_default_model_is_used_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_volume, "place_default_model", lambda folder, _report: fill(folder))
    assert main({"MODEL": "", "MODELS": str(tmp_path)}) == 0
    assert (tmp_path / DEFAULT_MODEL_NAME / "config.json").is_file()


@pytest.mark.parametrize("name", ["model", "../model", "a/b/c", "/etc"])
def test_an_invalid_hub_id_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="must be a hub id"):
        place_model(name, tmp_path, print)


def test_a_volume_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelUnavailable, match="cannot be written"):
        place_model("team/model", tmp_path / "models", print)
