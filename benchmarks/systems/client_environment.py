"""A virtual environment per load generator or other client, in the cache folder.

A list in `requirements/clients` of the checkout pins all packages of an environment, which is
recreated when its list has changed.
"""

import hashlib
import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.client_process import REPOSITORY
from benchmarks.systems.system import Say
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.vllm_install import TORCH

LISTS = REPOSITORY / "requirements" / "clients"
INSTALL_TIMEOUT_S = 1800
STAMP = "tideserve-list"


def ensure_client(name: str, cache: Path, say: Say, *, torch: bool = False) -> Path:
    """The Python of the environment for list `name`, created if missing.

    `torch`: install torch first, so that no list pulls another build. Raises SystemUnavailable.
    """
    wanted = LISTS / f"{name}.txt"
    if not wanted.is_file():
        raise SystemUnavailable(f"{name} has no list of packages here; run this from a checkout")
    folder = cache / "clients" / name
    python, stamp = folder / "bin" / "python", folder / STAMP
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != digest:
        say(f"{name}: installing into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        if torch:
            index = os.environ.get("TORCH_INDEX")
            install(python, [TORCH, *(["--index-url", index] if index else [])], TORCH)
        install(python, ["--no-deps", "-r", str(wanted)], wanted.name)
        stamp.write_text(digest)
    return python


def install(python: Path, arguments: Sequence[str], subject: str) -> None:
    """Install `what` with the pip of `python`. Raises SystemUnavailable."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    try:
        done = subprocess.run(
            [*pip, *arguments],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemUnavailable(
            f"pip did not install {subject} within {INSTALL_TIMEOUT_S} s; try again"
        ) from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise SystemUnavailable(f"pip could not install {subject}: {last}")
