"""Files and messages of `up` while the disk of the cluster folder is full."""

import io
import select
import socket
import time
from pathlib import Path

import pytest

from tests.support.exhausted import no_room_for_files
from tideserve.cli import etcd_process
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.report import Report
from tideserve.cli.upkeep import Upkeep

DEADLINE_S = 30.0


def test_files_that_cannot_be_written_are_reported_once_and_written_later(tmp_path: Path) -> None:
    stream, folder = io.StringIO(), ClusterFolder(tmp_path)
    upkeep = Upkeep(folder, Report(stream))
    state = {"pid": 1}
    with no_room_for_files():
        for _ in range(2):
            upkeep.write("cluster.json", lambda: folder.write_state(state))
        upkeep.write("targets", lambda: folder.write_targets("[]"))
        upkeep.run(None)
    state["pid"] = 2
    upkeep.run(None)
    assert folder.read_state() == {"pid": 2}
    assert folder.targets.read_text() == "[]"
    failed, healed = stream.getvalue().splitlines()
    assert failed.startswith(f"warning: cannot write cluster.json in {tmp_path} (File too large)")
    assert healed == f"{tmp_path} can be written again"


def test_a_full_etcd_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    upkeep = Upkeep(ClusterFolder(tmp_path), Report(stream))
    # None: without an answer the alarm remains as it was.
    states = [False, True, None, True, False, False, None]
    monkeypatch.setattr(etcd_process, "relieve", lambda url: states.pop(0) if states else None)
    end_s = time.monotonic() + DEADLINE_S
    while states:
        assert time.monotonic() < end_s
        upkeep.run("http://127.0.0.1:1")
    upkeep.close()
    full, relieved = stream.getvalue().splitlines()
    assert "alarm NOSPACE" in full
    assert relieved == "etcd accepts writes again"


def test_a_hanging_etcd_delays_nothing(tmp_path: Path) -> None:
    upkeep = Upkeep(ClusterFolder(tmp_path), Report(io.StringIO()))
    with socket.create_server(("127.0.0.1", 0)) as etcd:
        upkeep.run(f"http://127.0.0.1:{etcd.getsockname()[1]}")
        etcd.settimeout(DEADLINE_S)
        call, _ = etcd.accept()
        with call:
            call.settimeout(DEADLINE_S)
            request = b""
            while not request.endswith(b"{}"):
                request += call.recv(4096)
            upkeep.run("http://127.0.0.1:1")
            readable, _, _ = select.select([call], [], [], 0)
            assert not readable, "the call ended before `run` returned"
    upkeep.close()
