"""The cluster that `tideserve doctor` checks."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tideserve.cli.cluster_folder import ClusterFolder, default_folder
from tideserve.cli.commands.main import app
from tideserve.cli.doctor import run
from tideserve.cli.doctor.run import DoctorTarget

LOCAL, OTHER = "http://127.0.0.1:8155", "http://gateway.example:8000"


@pytest.fixture
def checked_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DoctorTarget | None]:
    """The targets of doctors, beside a local cluster on port 8155."""
    monkeypatch.setenv("TIDESERVE_CACHE", str(tmp_path))
    folder = ClusterFolder(default_folder(8155))
    folder.configs.mkdir(parents=True)
    folder.write_state({"url": LOCAL, "admin_url": "http://127.0.0.1:18155"})
    folder.write_config(
        "gateway",
        {"etcd_url": "http://127.0.0.1:1", "model_name": "m", "model_dir": str(tmp_path)},
    )
    targets: list[DoctorTarget | None] = []
    monkeypatch.setattr(run, "run_doctor", lambda target, *_: targets.append(target))
    return targets


@pytest.mark.parametrize(
    ("arguments", "variable", "whole", "url"),
    [
        (["--port", "8155"], None, True, LOCAL),
        (["--port", "8155"], OTHER, True, LOCAL),
        ([], LOCAL, True, LOCAL),
        (["--url", LOCAL + "/"], None, True, LOCAL),
        ([], OTHER, False, OTHER),
        (["--url", OTHER, "--port", "8155"], None, False, OTHER),
        (["--url", LOCAL, "--etcd", "http://127.0.0.1:2"], None, False, LOCAL),
    ],
)
def test_a_local_cluster_is_checked_completely(
    checked_targets: list[DoctorTarget | None],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variable: str | None,
    whole: bool,
    url: str,
) -> None:
    monkeypatch.delenv("TIDESERVE_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("TIDESERVE_URL", variable)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    (target,) = checked_targets
    assert target is not None
    assert (target.here, target.url) == (whole, url)


def test_a_port_without_a_cluster_is_reported(
    checked_targets: list[DoctorTarget | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDESERVE_URL", LOCAL)
    assert CliRunner().invoke(app, ["doctor", "--port", "8156"]).exit_code == 0
    assert checked_targets == [None]
