"""Set up `make serve` and `make test`: `.venv`, the packages, the default model.

Each finished step writes a stamp keyed by its inputs, so that a second run takes a fraction of a
second. An interrupted step leaves a marker instead, and the next run recreates the environment,
since pip takes a half-written package for installed. A file lock excludes concurrent runs.

Standard library only: this runs before anything is installed.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from long_step import StepFailed, end_with_parent, run_step, say
from torch_build import CUDA_BUILD, build_in, cuda_notice, has_nvidia_gpu, question

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tideserve.cli.cache import TAG_NAME, cache_root, create_cache  # noqa: E402
from tideserve.cli.etcd_binary import RELEASE, cached_etcd  # noqa: E402
from tideserve.cli.model_folder import damaged_files  # noqa: E402
from tideserve.cli.model_store import CONVERSION_BYTES, default_model_dir  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
UNFINISHED = STAMPS / "unfinished"
REQUIREMENTS = ROOT / "requirements"
MIB = 2**20
PACKAGES_MIB = 3 * 1024
DOWNLOAD_MIB = 512
TORCH = "torch"
LOCK_TIMEOUT_S = 1800.0
ETCD_RETRY_S = 86_400.0
ETCD_FETCH_S = 20
# Discard the package lists that apt downloads.
ETCD_MIB = 150
DEBIAN_TOOLS = ROOT / "scripts" / "debian_tools.sh"
TIMED_OUT = 124
TOOL_CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache")
NETWORK_REMEDY = (
    "Check that pip can reach its package index (`pip config list`), then run it again."
)


@dataclass(frozen=True)
class PipStep:
    """A call of `pip install`, repeated when a file in `inputs` changes."""

    name: str
    title: str
    arguments: Sequence[str | Path]
    inputs: Sequence[Path]
    index: str = ""

    def key(self) -> str:
        """Digests of the inputs of the step: the files, and the index if given."""
        digest = hashlib.sha256()
        for path in self.inputs:
            digest.update(path.read_bytes())
        return f"{digest.hexdigest()} {digest_of(self.index)}".strip()

    def is_done(self) -> bool:
        """Whether the stamp is current. Without an index, packages of any index are accepted."""
        done, wanted = stamp_fields(self.name), self.key().split()
        return bool(done) and done[: len(wanted)] == wanted


def digest_of(index: str) -> str:
    """Digest of an index for the stamp, since its URL may have a password; "" without index."""
    return hashlib.sha256(index.encode()).hexdigest() if index else ""


def stamp_fields(name: str) -> list[str]:
    """The fields in the stamp of a step; empty if the step has not been done."""
    stamp = STAMPS / name
    return stamp.read_text().split() if stamp.is_file() else []


def pip_steps(for_tests: bool, torch_index: str) -> list[PipStep]:
    """The installation steps in order; see the comments in the requirements files."""
    serve, nodeps, torch, dev = (
        REQUIREMENTS / f"{name}.txt" for name in ("serve", "nodeps", "torch", "dev")
    )
    index = ["--index-url", torch_index] if torch_index else []
    steps = [
        PipStep(
            "serve",
            "Installing the serving packages (about 300 MB to download)",
            ["--no-deps", "-r", serve, "-r", nodeps],
            [serve, nodeps],
        ),
        PipStep(
            TORCH,
            "Installing torch (CPU build: 190 MB to download; CUDA build: about 3 GB)",
            ["-c", serve, "-r", torch, *index],
            [torch],
            torch_index,
        ),
        PipStep(
            "project",
            "Installing the `tideserve` command",
            [
                "--no-deps",
                "--no-build-isolation",
                *("--config-settings", "editable_mode=compat"),
                "-e",
                ROOT,
            ],
            [ROOT / "pyproject.toml"],
        ),
    ]
    if for_tests:
        title = "Installing the packages for tests and checks (about 250 MB to download)"
        steps.append(PipStep("dev", title, ["--no-deps", "-r", dev], [dev]))
    return steps


def clean_environment() -> dict[str, str]:
    """Our environment without settings that would make pip install elsewhere or prompt."""
    elsewhere = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    quiet = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **quiet, "PYTHONUNBUFFERED": "1"}


def require_space(folder: Path, needed_mib: int, purpose: str) -> None:
    """Raise `StepFailed` unless the disk of `folder` (existing or not) has enough space."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_mib = shutil.disk_usage(existing).free // MIB
    if free_mib < needed_mib:
        raise StepFailed(
            f"Not enough disk space: {purpose} needs about {needed_mib} MiB in {existing},"
            f" which has {free_mib} MiB free. Free some space there and run it again."
        )


def take_lock() -> IO[str]:
    """Wait until no other set-up runs in this folder; the kernel frees the lock of a dead process.

    The lock is on this script itself, which avoids a lock file that could be deleted while held.
    """
    lock = Path(__file__).open("r+")  # noqa: SIM115 - held until the process ends
    started_s = time.monotonic()
    said_s = None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            waited_s = time.monotonic() - started_s
        if waited_s > LOCK_TIMEOUT_S:
            raise StepFailed("Another set-up has been running here for too long. Stop it first.")
        if said_s is None or waited_s - said_s >= 10:
            say(f"Another set-up is running in this folder: waiting for it ({waited_s:.0f} s).")
            said_s = waited_s
        time.sleep(0.2)


def ensure_venv_module(lock: IO[str]) -> None:
    """Ensure that this Python can create environments, which is a separate package on Debian."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        remedy = f"Install it (Debian and Ubuntu: apt-get install {package}), then run it again."
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise StepFailed(f"This Python cannot create virtual environments.\n{remedy}") from None
        install = f"apt-get update && apt-get install -y --no-install-recommends {package}"
        environment = {**clean_environment(), "DEBIAN_FRONTEND": "noninteractive"}
        title = f"Installing the system package {package}"
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "apt.log"
            run_step(title, ["sh", "-c", install], log, environment, lock.fileno(), remedy)


def ensure_venv(lock: IO[str], torch_index: str) -> None:
    """Create `.venv`; recreate it if incomplete, moved or of another Python.

    Another index for torch also needs a new environment: pip would keep the installed build.
    """
    key = f"{sys.version}\n{sys.executable}\n{ROOT}\n"
    stamp = STAMPS / "venv"
    if stamp.is_file() and stamp.read_text() == key and PYTHON.exists():
        installed = stamp_fields(TORCH)
        other_index = bool(torch_index and installed) and digest_of(torch_index) not in installed
        if not UNFINISHED.exists() and not other_index:
            return
        reason = "TORCH_INDEX has changed" if other_index else "The last set-up was interrupted"
        say(f"{reason}: recreating .venv.")
    require_space(ROOT, PACKAGES_MIB, "installing the packages (more for a CUDA build of torch)")
    ensure_venv_module(lock)
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    create: list[str | Path] = [sys.executable, "-m", "venv", VENV]
    log = VENV / "setup.log"
    remedy = "Run it again; if that fails too, `make clean` first."
    title = f"Creating .venv with Python {sys.version.split()[0]}"
    run_step(title, create, log, clean_environment(), lock.fileno(), remedy)
    # Write the stamp last, so that an interrupted creation is repeated.
    STAMPS.mkdir()
    stamp.write_text(key)


def check_torch_build(step: PipStep, lock: IO[str]) -> None:
    """Determine the build of torch with pip, print a notice for CUDA, and check the disk space."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "report.json"
        asking = question([PYTHON, "-m", "pip", "install"], step.arguments, answer)
        title, log = "Looking up the build of torch", VENV / "setup.log"
        run_step(title, asking, log, clean_environment(), lock.fileno(), NETWORK_REMEDY)
        build = build_in(answer)
    if build is CUDA_BUILD and not has_nvidia_gpu():
        say(cuda_notice(build))
    temporary = Path(tempfile.gettempdir())
    purpose = f"installing the {build.name} of torch"
    together = temporary.stat().st_dev == VENV.stat().st_dev
    require_space(VENV, build.unpacked_mib + together * build.download_mib, purpose)
    require_space(temporary, build.download_mib, purpose)


def install_packages(for_tests: bool, torch_index: str, lock: IO[str]) -> None:
    """Run the pip steps without a current stamp."""
    for step in pip_steps(for_tests, torch_index):
        if step.is_done():
            continue
        for folder in (Path(tempfile.gettempdir()), VENV):
            require_space(folder, DOWNLOAD_MIB, f"{step.title[0].lower()}{step.title[1:]}")
        if step.name == TORCH:
            check_torch_build(step, lock)
        UNFINISHED.touch()
        # Compiling all bytecode would double the time; modules compile at their first import, most
        # of them during the conversion of the model.
        pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--no-compile", *step.arguments]
        log = VENV / "setup.log"
        run_step(step.title, pip, log, clean_environment(), lock.fileno(), NETWORK_REMEDY)
        (STAMPS / step.name).write_text(step.key())
        UNFINISHED.unlink()


def ensure_model(lock: IO[str]) -> None:
    """Convert the default model unless it exists and is complete."""
    cache = cache_root()
    folder = default_model_dir(cache)
    if folder.is_dir() and not damaged_files(folder):
        return
    require_space(cache, CONVERSION_BYTES // MIB, "converting the default model")
    convert: list[str | Path] = [PYTHON, "-m", "tideserve.cli.model_store"]
    title = f"Converting the default model into {folder} (98 MB to 269 MB, up to a minute)"
    log = VENV / "setup.log"
    remedy = "Run it again; if that fails too, `make clean` first."
    run_step(title, convert, log, clean_environment(), lock.fileno(), remedy)


def fetch_etcd(cache: Path) -> None:
    """Fetch the etcd of a later Debian release into the cache; its binary is linked statically.

    Raises:
        StepFailed: with the cause.
    """
    require_space(cache, ETCD_MIB, "fetching etcd")
    target = cached_etcd(cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # `timeout` also terminates the children of the script.
        limited = ["timeout", str(ETCD_FETCH_S), str(DEBIAN_TOOLS), folder]
        done = subprocess.run(
            [*limited, f"etcd-server/{RELEASE}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        program = Path(folder) / "usr" / "bin" / "etcd"
        if done.returncode == TIMED_OUT:
            raise StepFailed("timed out")
        if done.returncode or not program.is_file():
            raise StepFailed(done.stderr.strip().rpartition("\n")[2] or "no etcd in the package")
        program.replace(target)


def ensure_etcd() -> None:
    """Fetch a maintained etcd unless it is cached, or an attempt failed less than a day ago.

    It is optional: the packages contain an older etcd.
    """
    cache, stamp = cache_root(), STAMPS / "etcd"
    tried = stamp.is_file() and time.time() - stamp.stat().st_mtime < ETCD_RETRY_S
    if tried or cached_etcd(cache).is_file():
        return
    say("Fetching a maintained etcd (11 MB)")
    try:
        create_cache(cache)
        fetch_etcd(cache)
    except (StepFailed, OSError) as error:
        say(f"Not available ({error}): using etcd from PATH, else the older etcd of the packages.")
        stamp.touch()


def clean(with_cache: bool) -> None:
    """Delete installed and built files, and with `with_cache` the cache folder if it is ours."""
    folders = [VENV, ROOT / "build", *(ROOT / name for name in TOOL_CACHES)]
    folders += [*ROOT.glob("*.egg-info")]
    for top in ("benchmarks", "services", "tideserve", "scripts", "tests"):
        folders += [*(ROOT / top).rglob("__pycache__")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    cache = cache_root()
    if with_cache and cache.is_dir():
        if not (cache / TAG_NAME).is_file():
            raise StepFailed(f"{cache} has no {TAG_NAME}, so it may hold more than our cache.")
        shutil.rmtree(cache)


def set_up(for_tests: bool, with_model: bool) -> None:
    """Run the remaining steps."""
    torch_index = os.environ.get("TORCH_INDEX", "").strip()
    with take_lock() as lock:
        ensure_venv(lock, torch_index)
        install_packages(for_tests, torch_index, lock)
        if with_model or not for_tests:
            ensure_etcd()
        if with_model:
            ensure_model(lock)


def main() -> int:
    """Set up or clean; returns 1 with a message on stderr on failure."""
    parser = argparse.ArgumentParser(description="Set up tideserve in this folder.")
    parser.add_argument("goal", choices=("serve", "test", "clean"))
    parser.add_argument(
        "--parent", type=int, help="process id of the caller, whose end stops the set-up"
    )
    parser.add_argument("--no-model", action="store_true", help="skip the default model")
    parser.add_argument(
        "--cache", action="store_true", help="with clean: also delete the cache folder"
    )
    arguments = parser.parse_args()
    if arguments.parent:
        # Do not outlive the calling shell script.
        end_with_parent(arguments.parent)
    os.chdir(ROOT)
    try:
        if arguments.goal == "clean":
            # Deleting files under a running set-up would break it.
            with take_lock():
                clean(arguments.cache)
        else:
            set_up(arguments.goal == "test", not arguments.no_model)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}. Check the disk and the permissions, then run it again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
