"""Which model upstream servers serve, and where its tokenizer comes from."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_openai import fake_openai
from tideserve.cli import upstream_model as module
from tideserve.cli.errors import CommandError
from tideserve.cli.local_cluster import free_port
from tideserve.cli.model_folder import ModelUnavailable
from tideserve.cli.upstream_model import UpstreamModel, model_folder, read_key, upstream_model


def models(*ids: str, **fields: Any) -> dict[str, Any]:
    return {"data": [{"id": name, **fields} for name in ids]}


def test_the_model_of_the_first_server_that_answers() -> None:
    with fake_openai() as server:
        server.pages["/v1/models"] = models("org/a", root="/models/a")
        absent = f"http://127.0.0.1:{free_port()}"
        found = upstream_model([absent, server.url], None, None)
        assert found == UpstreamModel("org/a", ("/models/a", "org/a"))
        server.pages["/v1/models"] = models("a", "b")
        assert upstream_model([server.url], None, "b") == UpstreamModel("b", ("b",))
        with pytest.raises(CommandError, match="serves a, b; choose one with --upstream-model"):
            upstream_model([server.url], None, None)
        del server.pages["/v1/models"]
        with pytest.raises(CommandError, match="serves no model"):
            server.pages["/v1/models"] = {}
            upstream_model([server.url], None, None)


@pytest.mark.parametrize(
    "url", ["http://h:8000/v1", "http://h/v1/", "h:8000", "ftp://h", "http://user:key@h", ""]
)
def test_malformed_urls_are_refused_before_any_is_called(url: str) -> None:
    with pytest.raises(CommandError, match=r"write it as http://HOST:PORT, without /v1"):
        upstream_model(["http://127.0.0.1:9", url], None, None)


def test_models_without_a_name_are_none() -> None:
    with fake_openai() as server, pytest.raises(CommandError, match="serves no model"):
        server.pages["/v1/models"] = {"data": [{"name": "x"}, 5]}
        upstream_model([server.url], None, None)


def test_servers_that_do_not_answer() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CommandError, match=f"no upstream server answers at {url}; start one"):
        upstream_model([url], None, None)


def test_the_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    found = model_folder(UpstreamModel("m", (str(tmp_path), "m")), print)
    assert found == tmp_path
    default = tmp_path / "default"
    monkeypatch.setattr(module, "prepare_default_model", lambda *_: default)
    name = "SmolLM2-135M-Instruct"
    for sources in ((name,), (f"/nowhere/{name}", name)):
        assert model_folder(UpstreamModel(name, sources), print) == default
    with pytest.raises(ModelUnavailable, match=r"serves m\.gguf, which is neither .* --model"):
        model_folder(UpstreamModel("m.gguf", ("m.gguf",)), print)


def test_a_key_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert (read_key(tmp_path / "key"), read_key(None)) == ("secret", None)
    with pytest.raises(CommandError, match="given as --upstream-key-file: No such file"):
        read_key(tmp_path / "none")
