"""The model that upstream servers serve, and the source of its tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_openai import fake_openai
from tests.support.ports import free_port
from tideserve.cli import upstream_model as module
from tideserve.cli.errors import CommandError
from tideserve.cli.model_folder import ModelUnavailable
from tideserve.cli.upstream_model import UpstreamModel, model_folder, read_key, upstream_model


def models(*ids: str, **fields: Any) -> dict[str, Any]:
    return {"data": [{"id": name, **fields} for name in ids]}


def test_the_model_comes_from_the_first_responding_server() -> None:
    with fake_openai() as server:
        server.pages["/v1/models"] = models("org/a", root="/models/a")
        absent = f"http://127.0.0.1:{free_port()}"
        model = upstream_model([absent, server.url], None, None)
        assert model == UpstreamModel("org/a", ("/models/a", "org/a"))
        server.pages["/v1/models"] = models("a", "b")
        assert upstream_model([server.url], None, "b") == UpstreamModel("b", ("b",), True)
        with pytest.raises(CommandError, match="serves a, b; choose one with --upstream-model"):
            upstream_model([server.url], None, None)
        del server.pages["/v1/models"]
        with pytest.raises(CommandError, match="serves no model"):
            server.pages["/v1/models"] = {}
            upstream_model([server.url], None, None)


def test_servers_of_different_models_are_refused() -> None:
    with fake_openai() as first, fake_openai() as second:
        first.pages["/v1/models"] = models("org/a")
        second.pages["/v1/models"] = models("org/b")
        urls = [first.url, second.url]
        with pytest.raises(CommandError) as raised:
            upstream_model(urls, None, None)
        assert str(raised.value) == (
            f"{second.url} serves org/b, but {first.url} serves org/a; start a cluster for each"
            " model"
        )
        second.pages["/v1/models"] = models("name here", root="/models/a")
        model = upstream_model(urls, None, None)
        assert (model.name, model.everywhere) == ("org/a", False)
        second.pages["/v1/models"] = models("b", "org/a")
        model = upstream_model(urls, None, "org/a")
        assert (model.name, model.everywhere) == ("org/a", True)


@pytest.mark.parametrize(
    "url",
    [
        *("http://h:8000/v1", "http://h/v1/", "h:8000", "ftp://h", "http://user:key@h", ""),
        *("http://h:abc", "http://h:", "http://[::1", "http://::1", "http://h:65536"),
    ],
)
def test_malformed_urls_are_refused_before_any_is_called(url: str) -> None:
    with pytest.raises(CommandError, match=r"write it as http://HOST:PORT, without /v1"):
        upstream_model(["http://127.0.0.1:9", url], None, None)


def test_models_without_a_name_are_ignored() -> None:
    with fake_openai() as server, pytest.raises(CommandError, match="serves no model"):
        server.pages["/v1/models"] = {"data": [{"name": "x"}, 5]}
        upstream_model([server.url], None, None)


def test_unresponsive_servers_are_an_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CommandError, match=f"no upstream server answers at {url}; start one"):
        upstream_model([url], None, None)


def test_the_model_folder_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    folder = model_folder(UpstreamModel("m", (str(tmp_path), "m")), print)
    assert folder == tmp_path
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


@pytest.mark.parametrize(
    "content", [b"", b"secret\nsecond", b"secret \x01", b"s\xc3\xa9cret", b"\xff"]
)
def test_a_malformed_key_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(CommandError, match="is not a key in printable ASCII") as raised:
        read_key(tmp_path / "key")
    assert "secret" not in str(raised.value)
