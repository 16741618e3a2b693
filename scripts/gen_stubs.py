"""Generate the gRPC stubs from `proto/`, or check that the committed stubs are up to date.

With `--release`, also store the contracts as those of the release: the checks then reject later
changes that services of this release would misread.

The stubs are committed so that running the services needs no compiler; the check keeps a
contract and its stubs from drifting apart. Needs the packages of `requirements/dev.txt`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = "tideserve"
STUBS = ROOT / PACKAGE
LAST_RELEASE = PROTO / "last_release.binpb"
# Hand-written parts of the namespace package, next to the stubs.
WRITTEN = ("cli", "client", "load", "sim")


class GenerationFailed(Exception):
    """The compiler rejected a contract and has printed the cause."""


def generate(target: Path) -> None:
    """Write the package `tideserve` below `target`."""
    # Import here, so that `main` reports a missing compiler without a traceback.
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    if not sources:
        raise GenerationFailed(f"no .proto file below {PROTO}")
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{PROTO}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        *(f"--{kind}_out={target}" for kind in ("python", "grpc_python")),
        *(f"--{kind}_out=quiet:{target}" for kind in ("mypy", "mypy_grpc")),
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise GenerationFailed("protoc rejected the contracts (see above)")
    package = target / PACKAGE
    # Not in the package itself, which is a namespace of several distributions.
    for folder in (path for path in package.rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()
    # Type checkers look for it in the topmost package that is not a namespace.
    for folder in package.iterdir():
        (folder / "py.typed").touch()


def keep_release() -> None:
    """Write the current contracts to `LAST_RELEASE`. Raises GenerationFailed."""
    buf = str(Path(sys.executable).parent / "buf")
    options = ["--as-file-descriptor-set", "--exclude-source-info", "-o", str(LAST_RELEASE)]
    if subprocess.run([buf, "build", *options], cwd=ROOT, check=False).returncode != 0:
        raise GenerationFailed("buf rejected the contracts (see above)")


def contents(folder: Path) -> dict[str, bytes]:
    """The generated files below `folder` by relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
        if path.relative_to(folder).parts[0] not in WRITTEN
    }


def differences(expected: Path, actual: Path) -> list[str]:
    """A line per file that is missing, left over or different in `actual`."""
    fresh, committed = contents(expected), contents(actual)
    lines = [f"missing:   {name}" for name in sorted(fresh.keys() - committed.keys())]
    lines += [f"left over: {name}" for name in sorted(committed.keys() - fresh.keys())]
    same_name = sorted(fresh.keys() & committed.keys())
    return lines + [f"differs:   {n}" for n in same_name if fresh[n] != committed[n]]


def main() -> int:
    """Write the stubs, or with `--check` compare them; returns 1 if they differ or fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    parser.add_argument(
        "--release", action="store_true", help="store proto/ as that of the last release"
    )
    arguments = parser.parse_args()
    check_only = arguments.check
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        try:
            generate(fresh)
            if arguments.release:
                keep_release()
        except ImportError as error:
            print(f"{error}: install requirements/dev.txt (`make gen` does)", file=sys.stderr)
            return 1
        except GenerationFailed as error:
            print(error, file=sys.stderr)
            return 1
        lines = differences(fresh / PACKAGE, STUBS)
        if check_only:
            if lines:
                print("\n".join(lines))
                print("The stubs are out of date: run `make gen` and commit them.")
            return 1 if lines else 0
        if lines:
            for name in {Path(name).parts[0] for name in contents(STUBS)}:
                # Remove generated folders first, so that stubs of deleted contracts vanish.
                shutil.rmtree(STUBS / name)
            shutil.copytree(fresh / PACKAGE, STUBS, dirs_exist_ok=True)
        print(f"{len(lines)} of {len(contents(fresh / PACKAGE))} files changed in {STUBS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
