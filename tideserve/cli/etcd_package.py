"""An etcd that is maintained, from a Debian release, unpacked into the cache and not installed.

The package index has none newer than 3.5.1. Where apt reaches a Debian mirror, the package of the
release below is fetched with folders of its own, so nothing of the system changes and nobody needs
to be root; apt checks the signatures. The program is linked statically and runs on other releases.

Standard library only: the set-up imports this before anything is installed.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

RELEASE = "trixie"
PACKAGE = "etcd-server"
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
OLD_SOURCES = Path("/etc/apt/sources.list")
FETCH_TIMEOUT_S = 20.0
# The lists of packages that apt loads are thrown away.
FREE_BYTES_MIN = 150 * 2**20


class EtcdNotFetched(Exception):
    """The package could not be had; the text says why."""


def cached_etcd(cache: Path) -> Path:
    """Where `fetch_etcd` puts the program; it may not be there."""
    return cache / "etcd" / RELEASE / "etcd"


def fetch_etcd(cache: Path, timeout_s: float = FETCH_TIMEOUT_S) -> Path:
    """Put the program into the cache unless it is there; its path. Takes at most `timeout_s`.

    Raises:
        EtcdNotFetched: if there is no apt, no Debian mirror, no network or no room.
    """
    target = cached_etcd(cache)
    if target.is_file():
        return target
    for command in ("apt-get", "dpkg"):
        if shutil.which(command) is None:
            raise EtcdNotFetched(f"there is no {command}")
    source = next_release_source(_read(SOURCES), _read(OLD_SOURCES))
    if shutil.disk_usage(_existing(cache)).free < FREE_BYTES_MIN:
        raise EtcdNotFetched(f"there is too little room in {cache}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        program = _fetch_into(Path(folder), source, time.monotonic() + timeout_s)
        program.replace(target)
    return target


def next_release_source(sources: str, old_sources: str) -> str:
    """An apt source (deb822) of the release at the mirror that this system takes Debian from.

    `sources` are stanzas, `old_sources` lines. Raises `EtcdNotFetched` if neither names one.
    """
    for stanza in sources.split("\n\n"):
        fields = dict(
            line.split(":", 1)
            for line in stanza.splitlines()
            if ":" in line and not line.startswith(("#", " "))
        )
        mirror = fields.get("URIs", "").split()
        if mirror and _is_debian(mirror[0]) and "deb" in fields.get("Types", "").split():
            signed = fields.get("Signed-By", "").strip()
            return _source(mirror[0], f"Signed-By: {signed}\n" if signed else "")
    for line in old_sources.splitlines():
        words = line.partition("#")[0].split()
        options = [word for word in words if word.startswith("[") or word.endswith("]")]
        rest = [word for word in words if word not in options]
        if len(rest) > 1 and rest[0] == "deb" and _is_debian(rest[1]):
            return _source(rest[1], "")
    raise EtcdNotFetched("apt has no Debian mirror here")


def _source(mirror: str, more: str) -> str:
    return f"Types: deb\nURIs: {mirror}\nSuites: {RELEASE}\nComponents: main\n{more}"


def _is_debian(mirror: str) -> bool:
    """Whether it is a mirror of Debian itself: not its security updates, not another system."""
    return mirror.rstrip("/").endswith("/debian")


def _fetch_into(folder: Path, source: str, deadline_s: float) -> Path:
    """The program of the package, unpacked in `folder`."""
    for name in ("sources", "lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources" / "next.sources").write_text(source)
    options = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": folder / "sources",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "0",
        "Acquire::http::Timeout": "5",
        "Acquire::https::Timeout": "5",
    }
    apt = ["apt-get", "-qq", *(part for item in options.items() for part in ("-o", _pair(*item)))]
    # Without this, missing lists are no error and the download fails with an unclear one.
    _run([*apt, "-o", "APT::Update::Error-Mode=any", "update"], folder, deadline_s)
    _run([*apt, "download", PACKAGE], folder, deadline_s)
    for package in folder.glob("*.deb"):
        _run(["dpkg", "-x", str(package), "unpacked"], folder, deadline_s)
    program = folder / "unpacked" / "usr" / "bin" / "etcd"
    if not program.is_file():
        raise EtcdNotFetched(f"the package {PACKAGE} of Debian {RELEASE} holds no etcd")
    return program


def _pair(name: str, value: object) -> str:
    return f"{name}={value}"


def _run(command: Sequence[str], folder: Path, deadline_s: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline_s - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EtcdNotFetched(f"{command[0]} took too long") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EtcdNotFetched(f"{command[0]} says: {last}")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
