import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from long_step import StepFailed

from tideserve.cli.etcd_binary import cached_etcd

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def setup_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, with its environment in `tmp_path` and its commands recorded, not run."""
    import setup

    script: Any = setup
    ran: list[list[str]] = []

    def run_step(title: str, command: list[Any], *_rest: Any) -> None:
        if "--dry-run" in command:
            answer = Path(command[command.index("--report") + 1])
            answer.write_text(json.dumps({"install": [{"metadata": script.torch}]}))
            return
        ran.append([str(word) for word in command])
        if command[1:3] == ["-m", "venv"]:
            (tmp_path / ".venv" / "bin").mkdir(parents=True)
            (tmp_path / ".venv" / "bin" / "python").touch()

    venv = tmp_path / ".venv"
    for name, value in {
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STAMPS": venv / "stamps",
        "UNFINISHED": venv / "stamps" / "unfinished",
        "run_step": run_step,
        "ran": ran,
        "torch": {"version": "2.13.0+cpu", "requires_dist": ["filelock"]},
        "has_nvidia_gpu": lambda: False,
        "PACKAGES_MIB": 0,  # whatever room this machine has
        "ensure_etcd": lambda: None,
    }.items():
        monkeypatch.setattr(setup, name, value, raising=False)
    yield setup


def pip_calls(script: ModuleType) -> int:
    """How many of the recorded commands install packages."""
    return sum(command[1:3] == ["-m", "pip"] for command in script.ran)


def test_a_second_run_does_nothing(setup_script: ModuleType) -> None:
    setup_script.set_up(for_tests=True, with_model=False)
    assert pip_calls(setup_script) == 4
    setup_script.ran.clear()
    setup_script.set_up(for_tests=True, with_model=False)
    assert setup_script.ran == []


def test_testing_after_serving_adds_only_what_is_missing(setup_script: ModuleType) -> None:
    setup_script.set_up(for_tests=False, with_model=False)
    setup_script.ran.clear()
    setup_script.set_up(for_tests=True, with_model=False)
    assert [command[-1] for command in setup_script.ran] == [str(ROOT / "requirements/dev.txt")]


def test_changed_pins_are_installed_again(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("serve", "nodeps", "torch", "dev"):
        (tmp_path / f"{name}.txt").write_text("")
    monkeypatch.setattr(setup_script, "REQUIREMENTS", tmp_path)
    setup_script.set_up(for_tests=False, with_model=False)
    (tmp_path / "serve.txt").write_text("x==1\n")
    setup_script.ran.clear()
    setup_script.set_up(for_tests=False, with_model=False)
    assert pip_calls(setup_script) == len(setup_script.ran) == 1


def test_a_run_that_was_cut_short_starts_afresh(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = setup_script.run_step

    def killed(title: str, command: list[Any], *rest: Any) -> None:
        recorded(title, command, *rest)
        if "pip" in command:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(setup_script, "run_step", killed)
        with pytest.raises(KeyboardInterrupt):
            setup_script.set_up(for_tests=False, with_model=False)
    setup_script.ran.clear()
    setup_script.set_up(for_tests=False, with_model=False)
    assert setup_script.ran[0][1:3] == ["-m", "venv"]


def test_torch_alone_comes_from_its_own_index(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "file:///builds")
    setup_script.set_up(for_tests=True, with_model=False)
    using = [command for command in setup_script.ran if "--index-url" in command]
    assert len(using) == 1
    assert str(ROOT / "requirements" / "torch.txt") in using[0]


def test_another_index_for_torch_starts_afresh_and_none_keeps_what_is_there(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    setup_script.set_up(for_tests=False, with_model=False)
    monkeypatch.setenv("TORCH_INDEX", "https://user:secret@builds.invalid/one")
    for expected in (4, 0):
        setup_script.ran.clear()
        setup_script.set_up(for_tests=False, with_model=False)
        assert len(setup_script.ran) == expected
    assert "TORCH_INDEX has changed" in capsys.readouterr().out
    monkeypatch.delenv("TORCH_INDEX")
    setup_script.set_up(for_tests=False, with_model=False)
    assert setup_script.ran == []
    stamps = [path.read_text() for path in setup_script.STAMPS.iterdir()]
    assert not any("secret" in text for text in stamps)


CUDA = {"version": "2.13.0", "requires_dist": ["sympy", "nvidia-cublas==13.1; platform_system"]}


def test_the_cuda_build_is_announced_where_there_is_no_gpu(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(setup_script, "torch", CUDA)
    monkeypatch.setattr(setup_script, "require_space", lambda _, mib, __: needed.append(mib))
    setup_script.set_up(for_tests=False, with_model=False)
    said = capsys.readouterr().out
    for word in ("no NVIDIA GPU", "3 GB", "7 GB", "TORCH_INDEX="):
        assert word in said
    assert max(needed) >= 7 * 1024


def test_with_a_gpu_the_cuda_build_is_what_was_meant(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_script, "torch", CUDA)
    monkeypatch.setattr(setup_script, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(setup_script, "require_space", lambda *_: None)
    setup_script.set_up(for_tests=False, with_model=False)
    assert "no NVIDIA GPU" not in capsys.readouterr().out


def test_too_little_space_for_the_build_ends_it_before_torch(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require_space(_: Path, needed_mib: int, purpose: str) -> None:
        if needed_mib > 4 * 1024:
            raise StepFailed(purpose)

    monkeypatch.setattr(setup_script, "torch", CUDA)
    monkeypatch.setattr(setup_script, "require_space", require_space)
    with pytest.raises(StepFailed, match="the CUDA build of torch"):
        setup_script.set_up(for_tests=False, with_model=False)
    assert pip_calls(setup_script) == 1


def test_too_little_space_is_said_first(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_script, "PACKAGES_MIB", 1 << 40)
    with pytest.raises(StepFailed, match="Free some space"):
        setup_script.set_up(for_tests=False, with_model=False)
    assert setup_script.ran == []


def test_a_python_without_venv_is_completed_by_root(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    setup_script.set_up(for_tests=False, with_model=False)
    assert "apt-get install" in setup_script.ran[0][-1]


def test_a_python_without_venv_is_explained_to_others(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(StepFailed, match=r"apt-get install python3\.\d+-venv"):
        setup_script.set_up(for_tests=False, with_model=False)


def test_settings_that_would_install_elsewhere_are_dropped(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    environment = setup_script.clean_environment()
    assert "PIP_TARGET" not in environment
    assert environment["PIP_TIMEOUT"] == "7"


def test_a_cache_folder_that_is_not_ours_is_not_deleted(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_script, "ROOT", tmp_path)
    monkeypatch.setenv("TIDESERVE_CACHE", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with pytest.raises(StepFailed, match="may hold more"):
        setup_script.clean(with_cache=True)
    (tmp_path / "home" / setup_script.TAG_NAME).touch()
    setup_script.clean(with_cache=True)
    assert not (tmp_path / "home").exists()


def test_without_a_recent_python_a_sentence_says_so(tmp_path: Path) -> None:
    for name in ("sh", "dirname"):
        (tmp_path / name).symlink_to(f"/bin/{name}" if name == "sh" else "/usr/bin/dirname")
    done = subprocess.run(
        ["/bin/sh", ROOT / "scripts" / "setup.sh", "serve"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Python 3.11" in done.stderr


def test_set_up_runs_on_the_standard_library_alone() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import setup"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, check=True)


def test_an_etcd_that_cannot_be_had_is_tried_again_a_day_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import setup

    tries = []

    def fetch(cache: Path) -> Path:
        tries.append(cache)
        raise StepFailed("there is no apt-get")

    for name, value in {
        "STAMPS": tmp_path,
        "cache_root": lambda: tmp_path / "cache",
        "fetch_etcd": fetch,
    }.items():
        monkeypatch.setattr(setup, name, value)
    setup.ensure_etcd()
    assert "None to be had (there is no apt-get)" in capsys.readouterr().out
    setup.ensure_etcd()
    assert tries == [tmp_path / "cache"]
    os.utime(tmp_path / "etcd", (0, 0))
    setup.ensure_etcd()
    assert len(tries) == 2


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


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a fake apt-get and dpkg; `calls` beside it lists what they did."""
    folder, calls = tmp_path / "programs", tmp_path / "calls"
    (tmp_path / "etc" / "sources.list.d").mkdir(parents=True)
    (tmp_path / "etc" / "sources.list.d" / "debian.sources").write_text(STANZAS)
    folder.mkdir()
    write_program(
        folder / "apt-get", f'echo "$@" >> {calls}; case "$*" in *download*) > x.deb;; esac'
    )
    write_program(folder / "dpkg", "mkdir -p $3/usr/bin; echo 3.5.16 > $3/usr/bin/etcd")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("APT_FOLDER", str(tmp_path / "etc"))
    return folder


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_etcd_is_unpacked_into_the_cache_and_nothing_else(apt: Path, tmp_path: Path) -> None:
    import setup

    target = cached_etcd(tmp_path / "cache")
    setup.fetch_etcd(tmp_path / "cache")
    assert target.read_text() == "3.5.16\n"
    assert os.listdir(target.parent) == ["etcd"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["update", "etcd-server/trixie"]
    assert all(f"Dir::State::Lists={target.parent}" in call for call in calls)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("exit 100", "the lists of Debian packages cannot be fetched"),
        ("exec sleep 60", "it took too long"),
        ('case "$*" in *download*) > x.deb;; esac', "its package has none"),
    ],
)
def test_an_etcd_that_is_not_fetched_leaves_nothing(
    apt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, cause: str
) -> None:
    import setup

    monkeypatch.setattr(setup, "ETCD_FETCH_S", 0.5 if "sleep" in script else 20)
    write_program(apt / "apt-get", script)
    write_program(apt / "dpkg", "mkdir -p $3")
    with pytest.raises(StepFailed, match=cause):
        setup.fetch_etcd(tmp_path / "cache")
    left = cached_etcd(tmp_path / "cache").parent
    assert list((tmp_path / "cache").rglob("*")) == [left.parent, left]


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "make client-tours " in done.stdout
