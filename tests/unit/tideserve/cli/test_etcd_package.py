"""What is asked of apt; a fake one, so that no test needs a network."""

import os
from pathlib import Path

import pytest

from tideserve.cli import etcd_package
from tideserve.cli.etcd_package import (
    EtcdNotFetched,
    cached_etcd,
    fetch_etcd,
    next_release_source,
)

STANZAS = """Types: deb
# a comment: with a colon
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /a/key.gpg
"""
LINE = "deb [signed-by=/a/key.gpg arch=amd64] http://old.test/debian/ bookworm main # here\n"


def test_the_source_is_the_same_mirror_with_the_other_release() -> None:
    source = next_release_source(STANZAS, LINE)
    assert source.splitlines() == [
        "Types: deb",
        "URIs: http://mirror.test/debian",
        "Suites: trixie",
        "Components: main",
        "Signed-By: /a/key.gpg",
    ]


def test_a_source_in_the_old_form() -> None:
    assert "URIs: http://old.test/debian/\n" in next_release_source("", f"# nothing\n{LINE}")


@pytest.mark.parametrize(
    "sources", ["", "URIs:\n", "Types: deb\nURIs: http://archive.test/ubuntu\nSuites: noble\n"]
)
def test_no_mirror_of_debian(sources: str) -> None:
    with pytest.raises(EtcdNotFetched, match="no Debian mirror"):
        next_release_source(sources, "deb cdrom: bookworm main\n")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a fake apt-get and dpkg; `calls` beside it lists what they did."""
    folder, calls = tmp_path / "programs", tmp_path / "calls"
    folder.mkdir()
    write(folder / "apt-get", f'echo "$@" >> {calls}; case "$*" in *download*) > x.deb;; esac')
    write(folder / "dpkg", "mkdir -p $3/usr/bin; echo 3.5.16 > $3/usr/bin/etcd")
    (tmp_path / "debian.sources").write_text(STANZAS)
    monkeypatch.setattr(etcd_package, "SOURCES", tmp_path / "debian.sources")
    monkeypatch.setattr(etcd_package, "FREE_BYTES_MIN", 0)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_it_is_unpacked_into_the_cache_once(programs: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fetch_etcd(cache) == cached_etcd(cache)
    assert cached_etcd(cache).read_text() == "3.5.16\n"
    # Nothing but the program is left, and apt was told folders of ours only.
    assert os.listdir(cached_etcd(cache).parent) == ["etcd"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["update", "etcd-server"]
    assert all(f"Dir::State::Lists={cache}" in call for call in calls)
    fetch_etcd(cache)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo 'E: no route to host' >&2; exit 100", "apt-get says: E: no route to host"),
        ("exec sleep 60", "apt-get took too long"),
        ("> x.deb", "holds no etcd"),
    ],
)
def test_what_goes_wrong_is_told_and_leaves_nothing(
    programs: Path, tmp_path: Path, script: str, cause: str
) -> None:
    write(programs / "apt-get", script)
    write(programs / "dpkg", "mkdir -p $3")
    with pytest.raises(EtcdNotFetched, match=cause):
        fetch_etcd(tmp_path / "cache", timeout_s=0.5)
    assert list((tmp_path / "cache").rglob("*")) == [
        tmp_path / "cache" / "etcd",
        cached_etcd(tmp_path / "cache").parent,
    ]


def test_without_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EtcdNotFetched, match="there is no apt-get"):
        fetch_etcd(tmp_path / "cache")
