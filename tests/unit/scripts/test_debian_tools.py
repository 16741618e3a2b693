"""Tools are downloaded once, and failures are explained."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "debian_tools.sh"
NEEDED = ("cat", "dpkg", "flock", "mkdir", "sed", "sh", "sort")


@pytest.fixture
def without_apt(tmp_path):
    """A PATH without apt."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in NEEDED:
        path = shutil.which(tool)
        if path is None:
            pytest.skip(f"no {tool} on this machine")
        (folder / tool).symlink_to(path)
    return {"PATH": str(folder)}


def run(arguments, environment=None):
    return subprocess.run(
        ["sh", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_missing_apt_is_an_error(tmp_path, without_apt):
    done = run([tmp_path / "tools", "kustomize"], without_apt)
    assert done.returncode == 77
    assert done.stderr == "debian_tools: no apt-get here: these tools come as Debian packages\n"


def test_fetched_packages_are_not_downloaded_again(tmp_path, without_apt):
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / ".packages").write_text("etcd-server/trixie\nkustomize\n")
    assert run([folder, "kustomize", "etcd-server/trixie"], without_apt).returncode == 0
    assert run([folder, "kustomize"], without_apt).returncode == 77


def test_invalid_arguments_show_the_usage(tmp_path):
    done = run([tmp_path])
    assert done.returncode == 2
    assert "FOLDER PACKAGE" in done.stderr


STANZAS = """Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /a/key.gpg
"""
LINES = """# deb http://other.test/debian sid main
deb http://old.test/debian-security bookworm-security main
deb [signed-by=/a/key.gpg arch=amd64] http://old.test/debian/ bookworm main # here
deb http://older.test/debian bookworm main
"""


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        (
            "sources.list.d/debian.sources",
            STANZAS,
            "Types: deb\nURIs: http://mirror.test/debian\nSuites: trixie\n"
            "Components: main contrib\nSigned-By: /a/key.gpg\n",
        ),
        (
            "sources.list",
            LINES,
            "Types: deb\nURIs: http://old.test/debian/\nSuites: trixie\nComponents: main\n",
        ),
    ],
)
def test_the_release_file_comes_from_the_same_mirror(tmp_path, name, text, made):
    etc, programs = tmp_path / "etc", tmp_path / "programs"
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / name).write_text(text)
    programs.mkdir()
    (programs / "apt-get").write_text("#!/bin/sh\nexit 100\n")
    (programs / "apt-get").chmod(0o755)
    environment = {**os.environ, "APT_FOLDER": str(etc)}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    done = run([tmp_path / "tools", "kustomize/trixie"], environment)
    assert done.returncode == 77 and "cannot be fetched" in done.stderr
    folder = tmp_path / "tools" / ".apt" / "sources"
    assert [path.name for path in folder.iterdir()] == ["trixie.sources"]
    assert (folder / "trixie.sources").read_text() == made


def test_a_system_without_a_debian_mirror_is_an_error(tmp_path):
    (tmp_path / "sources.list").write_text("deb cdrom: bookworm main\n")
    done = run(
        [tmp_path / "tools", "kustomize/trixie"], {**os.environ, "APT_FOLDER": str(tmp_path)}
    )
    assert done.returncode == 77 and "apt has no Debian mirror here" in done.stderr
