"""A private etcd whose data reaches its quota."""

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tideserve.cli import etcd_process
from tideserve.cli.cache import cache_root
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.etcd_binary import find_etcd
from tideserve.cli.etcd_process import _maintain, answers, private_etcd, relieve
from tideserve.cli.process import ServiceProcess

QUOTA_BYTES = 16 * 2**20
VALUE = base64.b64encode(bytes(2**20)).decode()
DEADLINE_S = 60.0


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(etcd_process, "QUOTA_BYTES", QUOTA_BYTES)
    monkeypatch.setattr(etcd_process, "RELIEVED_PART", 0.3)
    folder = ClusterFolder(tmp_path)
    folder.logs.mkdir()
    program, url = private_etcd(find_etcd(cache_root()), folder)
    process = ServiceProcess(program)
    process.start()
    end_s = time.monotonic() + DEADLINE_S
    while not answers(url):
        assert time.monotonic() < end_s, process.last_lines(20)
        time.sleep(0.1)
    yield url
    process.ask_to_stop()
    process.enforce(hurry=True)


def put(url: str, number: int) -> None:
    _maintain(url, "kv/put", key=base64.b64encode(bytes([number])).decode(), value=VALUE)


def fill(url: str, keys: int) -> None:
    """Overwrite `keys` keys until etcd refuses a write."""
    for number in range(200):
        try:
            put(url, number % keys)
        except HTTPError:
            return
    raise AssertionError("etcd has no quota")


def test_history_is_compacted_and_keys_are_kept(url: str) -> None:
    assert relieve(url) is False, "there is no alarm"
    fill(url, keys=2)
    assert relieve(url) is False
    put(url, 0)
    fill(url, keys=14)
    assert relieve(url), "the keys themselves take more than that part of the quota"
    with pytest.raises(HTTPError):
        put(url, 0)
    # A range from the first key to the end.
    everything = base64.b64encode(b"\0").decode()
    _maintain(url, "kv/deleterange", key=everything, range_end=everything)
    assert relieve(url) is False
    put(url, 0)


def test_an_unresponsive_etcd_is_left_unchanged() -> None:
    assert relieve("http://127.0.0.1:1") is None
