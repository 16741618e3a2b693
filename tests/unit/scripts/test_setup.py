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


def set_up(script: ModuleType, for_tests: bool = False) -> list[list[str]]:
    """Run setup without a model; return the recorded commands."""
    script.ran.clear()
    script.set_up(for_tests=for_tests, with_model=False)
    return list(script.ran)


def test_only_missing_packages_are_installed(setup_script: ModuleType) -> None:
    set_up(setup_script)
    added = set_up(setup_script, for_tests=True)
    assert [command[-1] for command in added] == [str(ROOT / "requirements/dev.txt")]
    assert set_up(setup_script, for_tests=True) == []


def test_changed_pins_are_installed_again(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("serve", "nodeps", "torch", "dev"):
        (tmp_path / f"{name}.txt").write_text("")
    monkeypatch.setattr(setup_script, "REQUIREMENTS", tmp_path)
    set_up(setup_script)
    (tmp_path / "serve.txt").write_text("x==1\n")
    assert len(set_up(setup_script)) == pip_calls(setup_script) == 1


def test_an_interrupted_run_starts_over(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = setup_script.run_step

    def killed(title: str, command: list[Any], *rest: Any) -> None:
        recorded(title, command, *rest)
        if "pip" in command:
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(setup_script, "run_step", killed)
        set_up(setup_script)
    assert set_up(setup_script)[0][1:3] == ["-m", "venv"]


def test_another_torch_index_starts_over_and_an_absent_index_keeps_the_build(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    set_up(setup_script)
    monkeypatch.setenv("TORCH_INDEX", "https://user:secret@builds.invalid/one")
    again = set_up(setup_script)
    assert len(again) == 4 and "TORCH_INDEX has changed" in capsys.readouterr().out
    (torch_alone,) = [command for command in again if "--index-url" in command]
    assert str(ROOT / "requirements" / "torch.txt") in torch_alone
    assert set_up(setup_script) == []
    monkeypatch.delenv("TORCH_INDEX")
    assert set_up(setup_script) == []
    stamps = [path.read_text() for path in setup_script.STAMPS.iterdir()]
    assert not any("secret" in text for text in stamps)


CUDA = {"version": "2.13.0", "requires_dist": ["sympy", "nvidia-cublas==13.1; platform_system"]}


@pytest.mark.parametrize("gpu", [False, True])
def test_the_cuda_build_is_announced_where_there_is_no_gpu(
    setup_script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: bool,
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(setup_script, "torch", CUDA)
    monkeypatch.setattr(setup_script, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(setup_script, "require_space", lambda _, mib, __: needed.append(mib))
    set_up(setup_script)
    output = capsys.readouterr().out
    for text in ("no NVIDIA GPU", "3 GB", "7 GB", "TORCH_INDEX="):
        assert (text in output) is not gpu
    assert max(needed) >= 7 * 1024


@pytest.mark.parametrize("room_mib", [4 * 1024, 0])
def test_too_little_space_stops_setup_before_the_download(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, room_mib: int
) -> None:
    def require_space(folder: Path, needed_mib: int, purpose: str) -> None:
        checked(folder, needed_mib if needed_mib <= room_mib else 1 << 40, purpose)

    checked = setup_script.require_space
    monkeypatch.setattr(setup_script, "torch", CUDA)
    monkeypatch.setattr(setup_script, "PACKAGES_MIB", 1)
    monkeypatch.setattr(setup_script, "require_space", require_space)
    with pytest.raises(StepFailed, match="the CUDA build of torch" if room_mib else "Free some"):
        set_up(setup_script)
    assert pip_calls(setup_script) == (room_mib > 0)


@pytest.mark.parametrize("user", [0, 1000])
def test_root_completes_a_python_without_venv_and_others_get_the_command(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    if user == 0:
        assert "apt-get install" in set_up(setup_script)[0][-1]
    else:
        with pytest.raises(StepFailed, match=r"apt-get install python3\.\d+-venv"):
            set_up(setup_script)


def test_settings_that_would_install_elsewhere_are_dropped(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    environment = setup_script.clean_environment()
    assert "PIP_TARGET" not in environment
    assert environment["PIP_TIMEOUT"] == "7"


def test_a_foreign_cache_folder_is_not_deleted(
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


def test_an_old_python_is_refused_with_an_error(tmp_path: Path) -> None:
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


def test_setup_needs_the_standard_library_only() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import setup"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, check=True)


def test_a_failed_etcd_download_is_retried_after_a_day(
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
    assert "Not available (there is no apt-get)" in capsys.readouterr().out
    setup.ensure_etcd()
    assert tries == [tmp_path / "cache"]
    os.utime(tmp_path / "etcd", (0, 0))
    setup.ensure_etcd()
    assert len(tries) == 2


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a fake apt-get and dpkg; `calls` beside it lists their calls."""
    folder, calls = tmp_path / "programs", tmp_path / "calls"
    (tmp_path / "etc" / "sources.list.d").mkdir(parents=True)
    (tmp_path / "etc" / "sources.list.d" / "debian.sources").write_text(
        "URIs: http://mirror.test/debian\nSuites: bookworm\nComponents: main\n"
    )
    folder.mkdir()
    write_program(
        folder / "apt-get", f'echo "$@" >> {calls}; case "$*" in *" download "*) > x.deb;; esac'
    )
    write_program(folder / "dpkg", "mkdir -p $3/usr/bin; echo 3.5.16 > $3/usr/bin/etcd")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("APT_FOLDER", str(tmp_path / "etc"))
    return folder


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_only_etcd_is_unpacked_into_the_cache(apt: Path, tmp_path: Path) -> None:
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
        ("exec sleep 60", "timed out"),
        ('case "$*" in *" download "*) > x.deb;; esac', "no etcd in the package"),
    ],
)
def test_a_failed_etcd_download_leaves_no_files(
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
