"""The distributions of the tree are built, installed into a new environment and imported."""

import json
import subprocess
import zipfile
from pathlib import Path

import build_wheels
import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.environment import TIMEOUT_S, Environment
from tests.support.tiny_models import make_tiny_model
from tideserve.cli.model_store import DEFAULT_MODEL_NAME

ROOT = Path(__file__).resolve().parents[2]
EVERY_COMMAND = """
import json
from typer.main import get_command
from typer.testing import CliRunner
from tideserve.cli.commands.main import app

def commands(command, path=()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))

run = CliRunner().invoke
print(json.dumps({
    " ".join(path): run(app, [*path, "--help"]).exit_code for path in commands(get_command(app))
}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built wheels by the normalized name of the distribution."""
    built = build_wheels.build(tmp_path_factory.mktemp("dist"))
    return {path.name.split("-")[0]: path for path in built}


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tops_of(names: set[str]) -> set[str]:
    """Packages in which type checkers look for py.typed; `tideserve` is a namespace package."""
    parts = [name.split("/") for name in names if name.endswith("/__init__.py")]
    return {
        "/".join(part_names[: 2 if part_names[0] == "tideserve" else 1]) for part_names in parts
    }


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def test_the_wheels_contain_each_file_of_the_tree_once(wheels: dict[str, Path]) -> None:
    assert list(wheels) == ["tideserve", "tideserve_api", "tideserve_client"]
    server, api, client = map(names_in, wheels.values())
    assert not server & api
    assert not (server | api) & client
    tracked = subprocess.run(
        ["git", "ls-files", "services", "tideserve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if tracked.returncode != 0:
        pytest.skip("needs the git repository to know which files belong to the tree")
    missing = set(tracked.stdout.split()) - server - api - client
    assert not missing
    shared = server | api | client
    assert "tideserve/__init__.py" not in shared, "it is a namespace of several wheels"
    assert {"tideserve/client/py.typed", "tideserve/client/sync.py"} <= client
    assert all(f"{top}/py.typed" in shared for top in tops_of(shared)), "types would not be read"
    # Users of tideserve-api may have other stubs of KServe's protocol.
    assert "tideserve/kserve/v2/inference_pb2.py" in server - api
    assert "tideserve/worker/py.typed" in api


def test_the_server_requires_stubs_of_its_version(wheels: dict[str, Path]) -> None:
    version = build_wheels.version()
    assert f"Requires-Dist: tideserve-api=={version}\n" in metadata_of(wheels["tideserve"])
    api = metadata_of(wheels["tideserve_api"])
    assert f"Version: {version}\n" in api
    needed = [line.split()[1] for line in api.splitlines() if line.startswith("Requires-Dist")]
    assert [requirement.split(">")[0].split("<")[0] for requirement in needed] == [
        "grpcio",
        "protobuf",
    ]


def test_the_client_needs_no_server(wheels: dict[str, Path], tmp_path: Path) -> None:
    needed = metadata_of(wheels["tideserve_client"])
    assert f"Requires-Dist: tideserve-api=={build_wheels.version()}\n" in needed
    assert "Requires-Dist: tideserve\n" not in needed
    environment = Environment(tmp_path / "environment")
    environment.install(wheels["tideserve_api"])
    environment.install(wheels["tideserve_client"])
    files = environment.imports("tideserve.client", "services.gateway.app", "tideserve.kserve")
    assert (files.pop("tideserve.client") or "").startswith(str(environment.packages))
    assert set(files.values()) == {None}


def test_the_stubs_work_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.install(wheels["tideserve_api"])
    stubs = "tideserve.worker.v1.worker_pb2_grpc"
    alone = environment.imports(stubs, "services.gateway.app", "tideserve.cli.commands.main")
    assert (alone.pop(stubs) or "").startswith(str(environment.packages))
    assert set(alone.values()) == {None}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with all wheels and this environment's packages, without the tree."""
    environment = Environment(tmp_path_factory.mktemp("installed") / "environment")
    for wheel in wheels.values():
        environment.install(wheel)
    return environment


def test_the_server_works_without_the_tree(installed: Environment) -> None:
    names = ("services.gateway.app", "services.worker.app", "tideserve.sim.cluster")
    for name, file in installed.imports(*names).items():
        assert file is not None and file.startswith(str(installed.packages)), name
    assert installed.command("tideserve", "version") == f"tideserve {build_wheels.version()}\n"
    assert "usage: tideserve-worker" in installed.command("tideserve-worker", "--help")
    example = installed.packages / "tideserve" / "sim" / "examples" / "closed-loop.yaml"
    assert "simulated, not measured" in installed.command("tideserve", "simulate", str(example))


def test_all_commands_have_help(installed: Environment) -> None:
    exit_codes = json.loads(installed.command("python", "-c", EVERY_COMMAND))
    assert {
        "serve",
        "up",
        "chat",
        "demo",
        "doctor",
        "profile",
        "simulate",
        "bench",
    } <= exit_codes.keys()
    assert {name for name, code in exit_codes.items() if code != 0} == set()


def test_benchmarks_need_a_checkout(installed: Environment) -> None:
    foreign = installed.packages / "benchmarks"
    foreign.mkdir()
    (foreign / "command.py").touch()
    with pytest.raises(AssertionError, match="run this command from a source checkout"):
        installed.command("tideserve", "bench", "steady", "--quick")


@pytest.mark.cluster
def test_a_model_is_served_and_examined(installed: Environment, tmp_path: Path) -> None:
    serving = Cluster(
        model_dir=make_tiny_model(tmp_path / "model"),
        workers=1,
        command=(str(installed.bin / "tideserve"),),
        subcommand="serve",
        environment={"PYTHONPATH": ""},
        threads=2,  # torch computes, as this environment's kernels are not compiled yet
    )
    with serving as cluster:
        at = ("--url", cluster.url, "--cluster-dir", str(cluster.folder / "cluster"))
        assert "answered within" in installed.command("tideserve", "doctor", *at)
        body = {"model": "model", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
        reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 3


@pytest.mark.slow
@pytest.mark.cluster
def test_the_default_model_is_served_without_a_cache(
    installed: Environment, tmp_path: Path
) -> None:
    """Without cache and compiled kernels; two workers, which merge."""
    environment = {"PYTHONPATH": "", "HOME": str(tmp_path), "TIDESERVE_CACHE": "", "PATH": ""}
    serving = Cluster(
        memory="1GiB",
        dtype="bfloat16",
        command=(str(installed.bin / "tideserve"),),
        subcommand="serve",
        environment=environment,
    )
    question = {
        "model": DEFAULT_MODEL_NAME,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    with serving as cluster:
        at = ("--url", cluster.url, "--cluster-dir", str(cluster.folder / "cluster"))
        assert "stable" in installed.command("tideserve", "drop", *at)
        reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=question, timeout=120)
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]
