"""Build the distributions of this tree into `dist/`: tideserve-api, tideserve-client, tideserve.

tideserve-api     the generated stubs, `tideserve.<contract>.v1`, with types
tideserve-client  the Python client, `tideserve.client`; needs tideserve-api
tideserve         services, command line and simulator; needs tideserve-api

`tideserve` is a namespace package: each distribution contains a part of it. The wheels are built
from copies, which leaves the tree unchanged, and with the setuptools of this environment, offline.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from gen_stubs import WRITTEN

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "proto" / "tideserve-api.toml"
CLIENT = ROOT / "proto" / "tideserve-client.toml"
# Only in the server: a process can load the KServe stubs of a single package.
PRIVATE = ("kserve",)
SERVER = tuple(name for name in (*WRITTEN, *PRIVATE) if name != "client")
BUILD_TIMEOUT_S = 300
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


class BuildFailed(Exception):
    """A distribution could not be built; the message names the cause."""


def version() -> str:
    """The version of the tree, shared by all distributions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = str(project["version"])
    wanted = f"tideserve-api=={declared}"
    client = tomllib.loads(CLIENT.read_text(encoding="utf-8"))["project"]
    for name, needed in (("pyproject.toml", project), (CLIENT.name, client)):
        if wanted not in needed["dependencies"]:
            raise BuildFailed(f"'dependencies' in {name} must have {wanted}; correct it")
    return declared


def lay_out_api(folder: Path) -> None:
    """Make `folder` the source tree of tideserve-api."""
    _describe(folder, API)
    contracts = (folder for folder in (ROOT / "tideserve").iterdir() if folder.is_dir())
    others = {*WRITTEN, *PRIVATE, "__pycache__"}
    _copy(folder, [contract.name for contract in contracts if contract.name not in others])


def lay_out_client(folder: Path) -> None:
    """Make `folder` the source tree of tideserve-client."""
    _describe(folder, CLIENT)
    _copy(folder, ["client"])


def lay_out_server(folder: Path) -> None:
    """Make `folder` the source tree of tideserve."""
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "services", folder / "services", ignore=IGNORED)
    _copy(folder, SERVER)


def _describe(folder: Path, project: Path) -> None:
    """Copy the metadata of `project` and the version to the sources in `folder`."""
    shutil.copy(project, folder / "pyproject.toml")
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "VERSION").write_text(version())


def _copy(folder: Path, names: Iterable[str]) -> None:
    """Copy parts of the namespace package."""
    for name in names:
        source, target = ROOT / "tideserve" / name, folder / "tideserve" / name
        shutil.copytree(source, target, ignore=IGNORED)


def build(dist: Path) -> list[Path]:
    """Build the wheels into `dist`, after removing earlier distributions; returns their paths.

    Raises:
        BuildFailed: if a wheel cannot be built.
    """
    dist.mkdir(parents=True, exist_ok=True)
    for old in (*dist.glob("*.whl"), *dist.glob("*.tar.gz")):
        old.unlink()
    for lay_out in (lay_out_api, lay_out_client, lay_out_server):
        with tempfile.TemporaryDirectory(prefix="tideserve-wheel-") as temporary:
            lay_out(Path(temporary))
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(dist), temporary]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
        if done.returncode != 0:
            raise BuildFailed(f"pip could not build a wheel:\n{done.stdout}{done.stderr}")
    return sorted(dist.glob("*.whl"))


def main() -> int:
    """Build the wheels and print their paths; returns 1 on failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for the wheels")
    try:
        wheels = build(parser.parse_args().dist)
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    for wheel in wheels:
        print(f"{wheel}  {wheel.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
