"""What `up` writes and says while the disk of the cluster's folder is full."""

import io
from pathlib import Path

import pytest

from tests.support.exhausted import no_room_for_files
from tideserve.cli import etcd_process
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.report import Report
from tideserve.cli.upkeep import Upkeep


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
    for full in (False, True, True, False, False):
        monkeypatch.setattr(etcd_process, "relieve", lambda url, full=full: full)
        upkeep.run("http://127.0.0.1:1")
    full, relieved = stream.getvalue().splitlines()
    assert "alarm NOSPACE" in full
    assert relieved == "etcd accepts writes again"
