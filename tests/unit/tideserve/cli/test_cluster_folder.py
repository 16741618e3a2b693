"""Logs of a cluster's folder stay bounded."""

from pathlib import Path

import pytest

from tests.support.exhausted import no_room_for_files
from tideserve.cli import cluster_folder
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.process import tail_lines


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder(tmp_path)
    made.logs.mkdir()
    return made


def test_an_open_log_is_truncated_and_a_single_predecessor_kept(
    folder: ClusterFolder,
) -> None:
    path, small = folder.log_path("worker-0"), folder.log_path("gateway")
    small.write_text("small\n")
    with path.open("ab", buffering=0) as log:
        for number in range(2):
            log.write(f"{number}{'x' * 100}\n".encode())
            folder.cap_logs(bytes_max=50)
            assert path.stat().st_size == 0
            assert path.with_suffix(".log.1").read_text().startswith(f"{number}x")
        log.write(b"goes on\n")
    assert path.read_bytes() == b"goes on\n", "the writer continues at the new beginning"
    assert tail_lines(path, 5, start=150) == ["goes on"], "its old place is behind the new end"
    assert small.read_text() == "small\n"
    assert not small.with_suffix(".log.1").exists()


def test_old_lines_are_dropped_to_free_disk_space(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.log_path("etcd")
    path.write_text("x" * 100)
    path.with_suffix(".log.1").write_text("older")

    def no_space(*_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster_folder.shutil, "copyfile", no_space)
    folder.cap_logs(bytes_max=50)
    assert path.stat().st_size == 0
    assert not path.with_suffix(".log.1").exists()


def test_a_removed_log_is_not_an_error(folder: ClusterFolder) -> None:
    folder.log_path("gone").symlink_to(folder.root / "nowhere")
    folder.cap_logs(bytes_max=0)


def test_a_failed_write_keeps_the_old_file_and_frees_its_space(folder: ClusterFolder) -> None:
    folder.write_state({"pid": 1})
    with no_room_for_files(), pytest.raises(OSError, match="too large"):
        folder.write_state({"pid": 2})
    assert folder.read_state() == {"pid": 1}
    assert [path.name for path in folder.root.iterdir() if path.is_file()] == ["cluster.json"]
