"""The admin port of a local cluster is found by its folder."""

import os
import socket
from pathlib import Path

import pytest

from tideserve.cli.cluster_folder import ClusterFolder, default_folder, find_admin_url
from tideserve.cli.errors import CommandError
from tideserve.cli.host import hold_port

STATE = {"url": "http://127.0.0.1:8000", "admin_url": "http://127.0.0.1:18000"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDESERVE_CACHE", str(tmp_path))


def running(root: Path, **changes: object) -> None:
    root.mkdir(parents=True)
    ClusterFolder(root).write_state(STATE | changes)


def test_the_admin_port_is_read_from_the_cluster_folder(tmp_path: Path) -> None:
    running(default_folder(8000))
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"):
        assert find_admin_url(None, url, None) == STATE["admin_url"]
    running(tmp_path / "elsewhere", url="http://127.0.0.1:9000", admin_url="http://a")
    assert find_admin_url(None, STATE["url"], tmp_path / "elsewhere") == "http://a"
    assert find_admin_url("http://given", "nonsense", None) == "http://given"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "http://127.0.0.1:9000",
            "no cluster runs on this machine at http://127.0.0.1:9000",
        ),
        ("http://gateway.example:8000", "pass the admin port of its gateway with --admin-url"),
        ("http://gateway.example", "has no port of a local cluster; pass the admin port"),
        ("http://gateway:port", "has no port"),
    ],
)
def test_an_unknown_address_is_an_error_with_a_remedy(url: str, message: str) -> None:
    running(default_folder(8000))
    with pytest.raises(CommandError, match=message):
        find_admin_url(None, url, None)


def test_running_clusters_are_listed() -> None:
    running(default_folder(9000), url="http://127.0.0.1:9000", pid=2**30)
    with pytest.raises(CommandError, match=r"at http://127.0.0.1:8000 by .*; start a cluster with"):
        find_admin_url(None, STATE["url"], None)
    running(default_folder(8155), url="http://127.0.0.1:8155", pid=os.getpid())
    message = r"a cluster runs at http://127.0.0.1:8155: add --url http://127.0.0.1:8155, or pass"
    with pytest.raises(CommandError, match=message):
        find_admin_url(None, STATE["url"], None)
    running(default_folder(8156), url="http://127.0.0.1:8156", pid=os.getpid())
    with pytest.raises(CommandError, match=r"http://127.0.0.1:8155, http://127.0.0.1:8156: add"):
        find_admin_url(None, STATE["url"], None)


def test_a_cluster_without_an_admin_port_is_an_error() -> None:
    running(default_folder(8000), admin_url=None)
    with pytest.raises(CommandError, match="has no admin port; restart it"):
        find_admin_url(None, STATE["url"], None)


def test_a_reserved_port_is_free_for_a_later_server() -> None:
    with hold_port("127.0.0.1", 0, "a test") as held:
        port = held.getsockname()[1]
        for _ in range(2):
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                with hold_port("127.0.0.1", port, "a test") as other:
                    assert other.getsockname()[1] != port, "another process listens there"
    with pytest.raises(CommandError, match="is free for a test"):
        hold_port("192.0.2.1", 0, "a test")
