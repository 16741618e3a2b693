from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from tideserve.cli.hub import download
from tideserve.cli.model_folder import ModelUnavailable


def quiet(_line: str) -> None:
    """Drop a progress line."""


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[dict[str, Any]]:
    """Replace the hub's client; returns the list that its calls are added to."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(hub_id: str, **options: Any) -> str:
        calls.append({"hub_id": hub_id, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def http_error(kind: type[Exception]) -> Exception:
    """An error as the hub's client raises it, without the response that it would carry."""
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error")
    return error


def test_only_data_files_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, tmp_path)
    assert download("org/name", quiet) == tmp_path
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert {"*.py", "*.bin"} <= set(calls[0]["ignore_patterns"])


def test_dummy_weights_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, tmp_path)
    download("org/name", quiet, load_format="dummy")
    assert "*.safetensors" not in calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http_error(GatedRepoError), "HF_TOKEN"),
        (http_error(RepositoryNotFoundError), "spelling"),
        (LocalEntryNotFoundError("no connection"), "network"),
        (httpx2.ConnectError("name not known"), "network"),
        (OSError("disk full"), "network"),
    ],
)
def test_each_failure_says_its_remedy(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, words: str
) -> None:
    fake_hub(monkeypatch, answer)
    with pytest.raises(ModelUnavailable, match=words):
        download("org/name", quiet)
