"""Fetching tools says why it is not possible, and is done once."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "debian_tools.sh"
NEEDED = ("cat", "dpkg", "flock", "mkdir", "sed", "sh", "sort")


@pytest.fixture
def without_apt(tmp_path):
    """A PATH on which there is no apt."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in NEEDED:
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"no {tool} on this machine")
        (folder / tool).symlink_to(found)
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


def test_without_apt_it_says_so(tmp_path, without_apt):
    done = run([tmp_path / "tools", "kustomize"], without_apt)
    assert done.returncode == 77
    assert done.stderr == "debian_tools: no apt-get here: these tools come as Debian packages\n"


def test_what_is_there_is_not_fetched_again(tmp_path, without_apt):
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / ".packages").write_text("etcd-server/trixie\nkustomize\n")
    assert run([folder, "kustomize", "etcd-server/trixie"], without_apt).returncode == 0
    assert run([folder, "kustomize"], without_apt).returncode == 77


def test_a_wrong_call_shows_the_usage(tmp_path):
    done = run([tmp_path])
    assert done.returncode == 2
    assert "FOLDER PACKAGE" in done.stderr
