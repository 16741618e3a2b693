import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tideserve.cli.model_folder import ModelUnavailable
from tideserve.cli.model_store import download, resolve_model
from tideserve.cli.up import name_of


def quiet(_line: str) -> None:
    """Drop a progress line."""


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[dict[str, Any]]:
    """Replace the hub's client; returns the list of its calls."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(hub_id: str, **options: Any) -> str:
        calls.append({"hub_id": hub_id, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def http_error(kind: type[Exception]) -> Exception:
    """An error of the hub's client, without its response."""
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error")
    return error


def test_only_data_files_are_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, tmp_path)
    assert download("org/name", quiet) == tmp_path
    assert (calls[0]["hub_id"], calls[0]["revision"]) == ("org/name", None)
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert {"*.py", "*.bin"} <= set(calls[0]["ignore_patterns"])


def test_a_revision_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, tmp_path)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert resolve_model(f"org/name@{commit}", tmp_path / "cache", quiet, "dummy") == tmp_path
    assert (calls[0]["hub_id"], calls[0]["revision"]) == ("org/name", commit)
    assert name_of(f"org/name@{commit}", tmp_path) == "org/name"


def test_dummy_weights_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, tmp_path)
    download("org/name", quiet, load_format="dummy")
    assert "*.safetensors" not in calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http_error(GatedRepoError), "HF_TOKEN"),
        (http_error(RepositoryNotFoundError), "spelling"),
        (http_error(RevisionNotFoundError), "has no org/name@v2"),
        (LocalEntryNotFoundError("no connection"), "network"),
        (httpx2.ConnectError("name not known"), "network"),
        (OSError("disk full"), "network"),
    ],
)
def test_each_failure_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, message: str
) -> None:
    fake_hub(monkeypatch, answer)
    with pytest.raises(ModelUnavailable, match=message):
        download("org/name@v2", quiet)


RESOLVE = """
import sys
from pathlib import Path
from tideserve.cli.model_store import ModelUnavailable, resolve_model
try:
    print(resolve_model("org/name", Path(sys.argv[1]), lambda line: None))
except ModelUnavailable as error:
    print(error)
"""


@pytest.fixture(params=["HF_HUB_OFFLINE", "HF_ENDPOINT"])
def offline(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Resolve org/name with the hub's own client, offline or without a result."""
    value = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}[request.param]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), request.param: value}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", RESOLVE, str(tmp_path / "cache")]

    def resolve() -> str:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    return resolve


def test_a_model_in_the_hubs_cache_is_served_from_there_without_a_connection(
    tmp_path: Path, offline: Callable[[], str]
) -> None:
    assert "cannot be reached" in offline()
    model = tmp_path / "hf" / "hub" / "models--org--name"
    snapshot = model / "snapshots" / ("0" * 40)
    for folder in (model / "blobs", model / "refs", snapshot):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    for number, name in enumerate(("config.json", "tokenizer.json", "model.safetensors")):
        (model / "blobs" / str(number)).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert offline() == str(snapshot)
    assert not (tmp_path / "cache").exists(), "nothing is copied"
