"""Metadata of the distributions matches the tree."""

import re
import tomllib
from pathlib import Path

import build_wheels
import pytest
from packaging.requirements import Requirement

STUBS = build_wheels.ROOT / "tideserve" / "worker" / "v1"


def test_stub_requirements_match_their_generators() -> None:
    project = tomllib.loads(build_wheels.API.read_text())["project"]
    needed = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, project["dependencies"])
    }
    code = (STUBS / "worker_pb2.py").read_text()
    generated_by = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", code)
    assert generated_by is not None
    protobuf = ".".join(generated_by.groups())
    generated_by = re.search(
        r"GENERATED_VERSION = '([\d.]+)'", (STUBS / "worker_pb2_grpc.py").read_text()
    )
    assert generated_by is not None
    assert f">={protobuf}" in str(needed["protobuf"]).split(",")
    assert f">={generated_by.group(1)}" in str(needed["grpcio"]).split(",")


def test_every_package_that_ships_has_type_information(tmp_path: Path) -> None:
    """The marker is in the folder of each package, as the namespace has none of its own."""
    for name in ("api", "client", "server"):
        folder = tmp_path / name
        folder.mkdir()
        getattr(build_wheels, f"lay_out_{name}")(folder)
        tops = [
            folder_
            for folder_ in (folder / "services", *folder.glob("tideserve/*"))
            if folder_.is_dir()
        ]
        assert tops
        assert [top.name for top in tops if not (top / "py.typed").exists()] == []


def test_all_distributions_have_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_wheels.version()
    text = (build_wheels.ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace("\nversion = ", "\nversion = '9.9' #"))
    monkeypatch.setattr(build_wheels, "ROOT", tmp_path)
    with pytest.raises(build_wheels.BuildFailed, match=re.escape("tideserve-api==9.9")):
        build_wheels.version()
    monkeypatch.setattr(build_wheels, "CLIENT", tmp_path / "client.toml")
    client = "[project]\ndependencies = ['tideserve-api==0.0']\n"
    (tmp_path / "client.toml").write_text(client)
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(build_wheels.BuildFailed, match=re.escape("'dependencies' in client.toml")):
        build_wheels.version()


def test_earlier_distributions_are_deleted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install dist/*.whl` would install them, too."""
    for name in ("other-1.0-py3-none-any.whl", "tideserve-0.0.tar.gz", "notes.txt"):
        (tmp_path / name).touch()

    def fail(folder: Path) -> None:
        raise build_wheels.BuildFailed("after the deletion")

    monkeypatch.setattr(build_wheels, "lay_out_api", fail)
    with pytest.raises(build_wheels.BuildFailed, match="after the deletion"):
        build_wheels.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
