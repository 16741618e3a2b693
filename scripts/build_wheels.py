"""Build the distributions of this tree into `dist/`: tideserve-api and tideserve.

tideserve-api    the generated stubs, `tideserve.<contract>.v1`, with types
tideserve        services, command line, benchmark and simulator; needs tideserve-api

`tideserve` is a namespace package: each distribution has a part of it. Both are built from copies,
so that the tree stays as it is, and with the setuptools of this environment: nothing is fetched.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from gen_stubs import WRITTEN

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "proto" / "tideserve-api.toml"
BUILD_TIMEOUT_S = 300
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


class BuildFailed(Exception):
    """A distribution could not be built; the message says why."""


def version() -> str:
    """The version of the tree, which both distributions have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = str(project["version"])
    wanted = f"tideserve-api=={found}"
    if wanted not in project["dependencies"]:
        raise BuildFailed(f"'dependencies' in pyproject.toml must have {wanted}; correct it")
    return found


def lay_out_api(folder: Path) -> None:
    """Make `folder` the source tree of tideserve-api."""
    shutil.copy(API, folder / "pyproject.toml")
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "VERSION").write_text(version())
    for contract in (ROOT / "tideserve").iterdir():
        if contract.is_dir() and contract.name not in {*WRITTEN, "__pycache__"}:
            target = folder / "tideserve" / contract.name
            shutil.copytree(contract, target, ignore=IGNORED)


def lay_out_server(folder: Path) -> None:
    """Make `folder` the source tree of tideserve."""
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "services", folder / "services", ignore=IGNORED)
    for name in WRITTEN:
        source, target = ROOT / "tideserve" / name, folder / "tideserve" / name
        shutil.copytree(source, target, ignore=IGNORED)


def build(dist: Path) -> list[Path]:
    """Build both wheels into `dist`, in the place of earlier ones; returns them.

    Raises:
        BuildFailed: if one cannot be built.
    """
    dist.mkdir(parents=True, exist_ok=True)
    for old in dist.glob("tideserve*.whl"):
        old.unlink()
    for lay_out in (lay_out_api, lay_out_server):
        with tempfile.TemporaryDirectory(prefix="tideserve-wheel-") as temporary:
            lay_out(Path(temporary))
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(dist), temporary]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
        if done.returncode != 0:
            raise BuildFailed(f"pip could not build a wheel:\n{done.stdout}{done.stderr}")
    return sorted(dist.glob("tideserve*.whl"))


def main() -> int:
    """Build, and print the paths; 1 when it cannot be done."""
    parser = argparse.ArgumentParser(description="Build the wheels tideserve-api and tideserve.")
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
