"""What the four services say about their configuration, started as people start them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.common.config import field_names
from tideserve.bench.client_process import python_environment
from tideserve.cli.cluster_options import CONFIGS

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
    known = {key.upper() for key in field_names(CONFIGS[service])}
    given = {f"TIDESERVE__{key}": value for key, value in SETTINGS.items() if key in known}
    given["TIDESERVE__ETCD_PASSWORD_FILE"] = str(password)
    kept = {key: text for key, text in os.environ.items() if not key.startswith("TIDESERVE")}
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--print-config"],
        capture_output=True,
        text=True,
        env=kept | python_environment() | given,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "hidden" not in done.stdout
    assert f"etcd_password: '***'  # {password} (TIDESERVE__ETCD_PASSWORD_FILE)\n" in done.stdout
    shown = yaml.safe_load(done.stdout)
    assert list(shown) == field_names(CONFIGS[service])
    assert shown["etcd_url"] == "https://etcd:2379"
    assert shown.get("memory_bytes") == ("3GiB" if service == "worker" else None)
