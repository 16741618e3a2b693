"""The four services print their configuration when started as commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.common.setting import settings_of
from tests.support.python import run_python
from tideserve.cli.cluster_options import CONFIGS
from tideserve.cli.local_cluster import python_environment

SETTINGS = {
    "ETCD_URL": "https://etcd:2379",
    "ETCD_USER": "tideserve",
    "MODEL_NAME": "m",
    "MODEL_DIR": "/models/m",
    "MEMORY_BYTES": "3GiB",
}


@pytest.mark.parametrize("service", list(CONFIGS))
def test_the_configuration_of_a_container_is_printed(service: str, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hidden\n")
    known = {key.upper() for key in settings_of(CONFIGS[service])}
    given = {f"TIDESERVE__{key}": value for key, value in SETTINGS.items() if key in known}
    given["TIDESERVE__ETCD_PASSWORD_FILE"] = str(password)
    kept = {key: text for key, text in os.environ.items() if not key.startswith("TIDESERVE")}
    environment = kept | python_environment() | given
    done = run_python("-m", f"services.{service}", "--print-config", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hidden" not in done.stdout
    assert f"etcd_password: '***'  # {password} (TIDESERVE__ETCD_PASSWORD_FILE)\n" in done.stdout
    shown = yaml.safe_load(done.stdout)
    assert list(shown) == list(settings_of(CONFIGS[service]))
    assert shown["etcd_url"] == "https://etcd:2379"
    assert shown.get("memory_bytes") == ("3GiB" if service == "worker" else None)


@pytest.mark.parametrize("command", ["tideserve", *(f"tideserve-{name}" for name in CONFIGS)])
def test_an_installed_command_finds_the_packages_from_any_folder(
    command: str, tmp_path: Path
) -> None:
    program = Path(sys.executable).with_name(command)
    if not program.exists():
        pytest.skip(f"{program} is made by the set-up (make test)")
    kept = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [program, "--help"],
        capture_output=True,
        text=True,
        env=kept,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "sage:" in done.stdout
    # The command line imports a command's modules when it runs, such as the doctor's stubs.
    stubs = [sys.executable, "-c", "import tideserve.common.v1, tideserve.cli.doctor.run"]
    assert subprocess.run(stubs, env=kept, cwd=tmp_path, timeout=60, check=False).returncode == 0
